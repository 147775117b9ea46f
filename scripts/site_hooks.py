"""Hooks of mkdocs: pages from the root of the repository, files that pages name there, and pages made from the code.

Pages are written to be read in the repository, too: their links lead there. ``../CHANGELOG.md`` becomes a page of the
site, and any other file of the repository one beside the pages; a link to one that does not exist breaks the build. A
link to a recording of an engine opens it in the server's own page, a copy of which is part of the site.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent

#: Pages at the root of the repository.
ROOT_PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
_UP = re.compile(r"(\]\()\.\./([^)#\s]+)")
_RECORDING = re.compile(r"(\]\()recordings/(\w+)\.jsonl\)")
#: The files of the server's page.
UI = ROOT / "octavo" / "server" / "ui"


def on_config(config: Any) -> Any:
    """Puts pages that the navigation does not name under "More", so that no page is lost."""
    named = set(_named(config["nav"]))
    more = sorted(path.name for path in Path(config["docs_dir"]).glob("*.md") if path.name not in named)
    if more:
        config["nav"].append({"More": more})
    return config


def _made_pages() -> dict[str, str]:
    """Pages that are made from the code, by name."""
    sys.path.insert(0, str(ROOT / "scripts"))  # mkdocs runs its hooks under names of its own
    pages = importlib.import_module("reference_pages").PAGES
    return {"api.md": importlib.import_module("api_page").render(), **{name: make() for name, make in pages.items()}}


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for each in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from _named(each)


def on_files(files: Any, config: Any) -> Any:
    """Adds what is not in the folder of the pages."""
    for name in ROOT_PAGES:
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    for name, text in _made_pages().items():
        files.append(File.generated(config, name, content=text))
    for name, content in _replays(Path(config["docs_dir"]) / "recordings"):
        files.append(File.generated(config, f"replay/{name}", content=content))
    linked = {
        path for page in Path(config["docs_dir"]).glob("*.md") for _, path in _UP.findall(page.read_text("utf-8"))
    }
    for path in sorted(linked.difference(ROOT_PAGES)):
        if (ROOT / path).is_file():
            files.append(File.generated(config, path, content=(ROOT / path).read_bytes()))
    return files


def _replays(recordings: Path) -> Iterator[tuple[str, bytes]]:
    """The server's page over each recording, and its files, by name."""
    for path in sorted(UI.rglob("*")):
        if path.is_file() and path.name != "index.html":
            # Addresses at the root of a server are relative to the page here.
            content = path.read_bytes().replace(b'"/ui/', b'"ui/').replace(b'href="/"', b'href="../index.html"')
            yield f"ui/{path.relative_to(UI).as_posix()}", content
    page = (UI / "index.html").read_text("utf-8").replace('="/ui/', '="ui/')
    for path in sorted(recordings.glob("*.jsonl")):
        mode = f'content="recording" data-recording="../recordings/{path.name}"'
        yield f"{path.stem}.html", page.replace('content="live"', mode).encode()


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with links to the root of the repository, and to recordings, as links within the site."""
    return _RECORDING.sub(r"\1replay/\2.html)", _UP.sub(r"\1\2", markdown))
