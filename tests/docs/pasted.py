"""Pastes the blocks of a page into a terminal, in an environment with nothing but what ``make demo`` installs."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

from octavo.loader.files import cache_dir
from tests.busy_machine import PATIENCE
from tests.docs.snippets import ROOT, Block

#: What ``octavo chat`` is asked where it stands alone.
QUESTION = "What is the capital of France?\n"
#: Seconds that a command may take: simulations of hours of traffic take minutes, and longer on a busy machine.
LONGEST = 5 * PATIENCE
#: What of the checkout the commands of the pages name.
_OF_CHECKOUT = ("scripts", "tests", "deploy", "docs", "dashboards")
_SERVE = re.compile(r"^(\.venv/bin/)?octavo serve\b")
_CHAT = re.compile(r"^(\.venv/bin/)?octavo chat\b")


class Failed(AssertionError):
    """A command or a program of a page did not end as it should."""


def make_environment(folder: Path, *extras: str) -> Path:
    """A virtual environment with the packages that ``make demo`` installs, and those of extras.

    The package itself is this checkout, with the kernels that are compiled in it. It takes seconds where uv's cache
    has the packages.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    # The running environment's uv, which scripts/install.py would install otherwise.
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for arguments in (["--editable", "build"], list(extras)):
        if arguments:
            command = [str(folder / "bin" / "python"), str(ROOT / "scripts" / "install.py"), *arguments]
            done = subprocess.run(command, env=environ, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


@dataclass
class Terminal:
    """A folder like a checkout after ``make demo``, in which a page's blocks are pasted one after the other.

    A server that a page starts runs until the page starts another one, or ends.
    """

    folder: Path
    environment: Path
    server: subprocess.Popen[bytes] | None = None
    port: int = 0
    _log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._log = self.folder.parent / f"{self.folder.name}.log"
        for name in _OF_CHECKOUT:
            (self.folder / name).symlink_to(ROOT / name)
        self.use(self.environment)

    def use(self, environment: Path) -> None:
        """Goes on in another environment."""
        self.environment = environment
        link = self.folder / ".venv"
        link.unlink(missing_ok=True)
        link.symlink_to(environment)

    @functools.cached_property
    def _home(self) -> Path:
        home = self.folder.parent / f"{self.folder.name}-home"
        home.mkdir()
        return home

    @property
    def environ(self) -> dict[str, str]:
        """Variables: those of the tests' own environment and options are left out, caches and settings of pip stay."""
        real = Path.home()
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OCTAVO_", "PYTEST"))
        }
        return {
            **kept,
            "PATH": f"{self.environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self._home),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(real / ".cache")),
            "XDG_CONFIG_HOME": os.environ.get("XDG_CONFIG_HOME", str(real / ".config")),
            "OCTAVO_CACHE": str(cache_dir()),
            "OCTAVO_PORT": str(self.port),
        }

    def run_program(self, block: Block) -> str:
        """Runs a program from a file, as engines of several processes start themselves from it; what it prints.

        A block that begins with ``# NAME.py`` is that file, which a later command names: it is kept, and imported.
        """
        if (name := re.match(r"# (\w+)\.py\b", block.text)) is not None:
            (self.folder / f"{name[1]}.py").write_text(block.text)
            return self._run(["python", "-c", f"import {name[1]}"], f"{block.page}:{block.line}", block.text)
        program = self.folder / "program.py"
        program.write_text("if __name__ == '__main__':\n" + textwrap.indent(self._at_port(block.text), "    "))
        return self._run(["python", "program.py"], f"{block.page}:{block.line}", block.text)

    def type(self, line: str, where: str) -> str:
        """Types a command; what it prints. A server is started and waited for, a conversation gets one question."""
        line = self._at_port(line)
        if _SERVE.match(line):
            self._serve(line, where)
            return ""
        question = QUESTION if _CHAT.match(line) and "<" not in line else None
        return self._run(["bash", "-c", line], where, line, question)

    def _run(self, command: list[str], where: str, text: str, stdin: str | None = None) -> str:
        program = shutil.which(command[0], path=self.environ["PATH"])
        assert program is not None
        try:
            done = subprocess.run(
                [program, *command[1:]],
                cwd=self.folder,
                env=self.environ,
                input=stdin or "",
                capture_output=True,
                text=True,
                timeout=LONGEST,
            )
        except subprocess.TimeoutExpired as e:
            raise Failed(f"{where}: {text}\nhas not ended after {LONGEST:.0f} s") from e
        if done.returncode:
            raise Failed(f"{where}: {text}\nends with {done.returncode}\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
        return done.stdout

    def _at_port(self, text: str) -> str:
        """The text with the port of this terminal's server: 8000 may be taken."""
        if not self.port:
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))
                self.port = sock.getsockname()[1]
        text = re.sub(r"(127\.0\.0\.1|localhost):8000\b", rf"\1:{self.port}", text)
        return re.sub(r"--port 8000\b", f"--port {self.port}", text)

    def _serve(self, line: str, where: str) -> None:
        self.stop()
        with self._log.open("wb") as log:
            self.server = subprocess.Popen(
                ["bash", "-c", f"exec {line}"], cwd=self.folder, env=self.environ, stdout=log, stderr=log
            )
        end = time.monotonic() + PATIENCE
        while " serving " not in (said := self._log.read_text(errors="replace")):
            if self.server.poll() is not None or time.monotonic() > end:
                raise Failed(f"{where}: {line}\ndoes not serve\n{said[-3000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stops the server, if one runs."""
        server, self.server = self.server, None
        if server is None:
            return
        server.send_signal(signal.SIGTERM)
        try:
            code = server.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
            raise
        if code:
            raise Failed(f"the server of {self.folder.name} ended with {code}\n{self._log.read_text()[-3000:]}")

    def close(self) -> None:
        """Stops the server whatever its state."""
        with contextlib.suppress(Failed):
            self.stop()
