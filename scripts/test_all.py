"""Runs every test that this machine can, and lists at the end what failed, what was skipped, and why.

    scripts/test_all.py PROCESSES [pytest options]

The default suite comes first, in so many processes; then the slow tests in one, as some of them measure time.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "test-all"


def run(name: str, options: list[str]) -> tuple[str, Path]:
    """Runs pytest; what kept the part from its end ("" if nothing did), and the report that it wrote (JUnit's XML)."""
    print(f"== {name}", flush=True)
    file = FOLDER / f"{name.replace(' ', '-')}.xml"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"--junitxml={file}", *options]
    return problem(name, subprocess.run(command, cwd=ROOT).returncode, file), file


def problem(name: str, code: int, report: Path) -> str:
    """Why a part has no whole report, by pytest's exit code: the tests that it did not come to are in no list."""
    # 0: all have passed; 1: some have failed, which the report says; 5: the options select none.
    return "" if code in (0, 1, 5) and report.exists() else f"the {name} did not come to their end: exit code {code}"


def summary(files: list[Path]) -> tuple[str, bool]:
    """The counts of these reports, what failed, and what was skipped, by reason; and whether any test failed."""
    cases = [case for file in files for case in ET.parse(file).iter("testcase")]
    failed: list[str] = []
    skipped: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}".removeprefix("::")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif (skip := case.find("skipped")) is not None:
            skipped[_reason(skip)].append(name)
    num_skipped = sum(map(len, skipped.values()))
    lines = [f"== {len(cases) - len(failed) - num_skipped} passed, {len(failed)} failed, {num_skipped} skipped"]
    lines += [f"failed: {name}" for name in failed]
    for reason, names in sorted(skipped.items(), key=lambda item: -len(item[1])):
        places = sorted({name.split("::")[0] for name in names})
        lines.append(f"skipped {len(names)}: {reason} ({', '.join(places)})")
    return "\n".join(lines), bool(failed)


def _reason(skip: ET.Element) -> str:
    message = skip.get("message") or "without a reason"
    if message == "collection skipped":  # a whole module: the text has its file, the line and the reason
        message = str(ast.literal_eval(skip.text or "('', 0, '')")[2]).removeprefix("Skipped: ")
    return message


def main(processes: str, *options: str) -> int:
    """Runs both parts; 0 if all has passed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    parallel = ["-n", processes, "--dist", "loadfile", "--no-loadscope-reorder"]
    parts = [
        run("default tests", [*parallel, "-m", "not slow", *options]),
        run("slow tests", ["-m", "slow", *options]),
    ]
    problems = [text for text, _ in parts if text]
    text, failed = summary([file for _, file in parts if file.exists()])
    print("\n".join([text, *problems]))
    print(f"in {(time.monotonic() - start) / 60:.0f} minutes; the reports are in {FOLDER.relative_to(ROOT)}")
    return int(failed or bool(problems))


if __name__ == "__main__":
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        sys.exit()
    sys.exit(main(*sys.argv[1:]))
