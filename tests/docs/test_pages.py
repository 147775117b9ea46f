"""What pages say of the code is so: links, messages, metrics, pictures; and the README stays short."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli import reference
from tests.docs.snippets import PAGES, ROOT
from tests.docs.source_messages import texts
from tests.test_package import script

LINK = re.compile(r"\]\(([^)\s]+)\)")
EVERY = [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in LINK.findall(text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} has no such heading"


def test_the_readme_is_short_and_begins_with_two_commands() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 120
    assert [line.split()[:2] for line in lines[3:5]] == [["make", "demo"], ["make", "test"]]


def test_each_row_of_speed_in_the_readme_is_one_of_the_page_of_figures() -> None:
    def rows(name: str) -> list[str]:
        text = (ROOT / name).read_text(encoding="utf-8")
        found = re.findall(r"^\| [^|]*\| ([^|]*(?:Octavo|llama|vllm)[^|]*\|.*\d.*)$", text, re.MULTILINE)
        return [row.replace(" ", "") for row in found]

    ours = rows("README.md")
    assert len(ours) > 5 and set(ours) <= set(rows("docs/performance.md"))


def test_each_message_of_the_page_of_troubles_is_in_the_source() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 25
    source = texts()
    missing = [message for message in messages if not any(message in text for text in source)]
    assert not missing, "no module of octavo/ has: " + "; ".join(missing)


def served(name: str, kind: str) -> list[str]:
    """Names of a family's series on ``/metrics``, without "octavo_"."""
    if kind == "histogram":
        return [f"{name}_{part}" for part in ("bucket", "sum", "count")]
    return [name + reference.SUFFIXES.get(kind, "")]


def test_every_series_of_metrics_has_its_advice_and_every_rule_its_series() -> None:
    families = reference.metric_families()
    assert set(reference.metric_advice()) == set(families)
    for rule in script("reference_pages").alert_rules():
        assert {"alert", "expr", "for", "labels", "annotations"} == set(rule)
        # Labels that are compared must be labels of the series.
        for name, matchers in re.findall(r"octavo_(\w+)\{([^}]*)\}", rule["expr"]):
            [known] = [labels for key, (kind, _, labels) in families.items() if name in served(key, kind)]
            assert set(re.findall(r"(\w+)(?:=~|!=|=)", matchers)) <= {"model_name", *known}, rule["alert"]
        for name in re.findall(r"octavo_(\w+)", rule["expr"]):
            kinds = [name in served(key, kind) for key, (kind, _, _) in families.items()]
            assert any(kinds), f"{rule['alert']}: {name} is served under another name"


def test_the_pictures_of_the_pages_are_there_and_say_what_they_show() -> None:
    page = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
    shown = re.findall(r"!\[(.*?)\]\(pictures/(.*?)\)", page)
    assert len(shown) == 7
    for text, name in shown:
        assert len(text) > 40
        assert (ROOT / "docs" / "pictures" / name).stat().st_size < 300_000


def test_the_recordings_of_the_pictures_show_what_the_page_says() -> None:
    pytest.importorskip("matplotlib")
    pictures = script("docs_pictures")
    small = {"num_gpu_blocks_override": 20, "block_size": 16, "max_model_len": 256, "watermark": 0.0}
    crowd = [pictures.item(0, 80, 60), pictures.item(1, 70, 60), pictures.item(2, 90, 50)]
    plain = {**small, "enable_prefix_caching": False}
    recomputed = pictures.simulated(crowd, **plain, preemption_mode="recompute")
    assert [step.preempted for step in recomputed.steps if step.preempted] == [[2]]
    assert sum(sum(step.prefill.values()) for step in recomputed.steps) > 80 + 70 + 90
    swapped = pictures.simulated(crowd, **plain, preemption_mode="swap", num_host_blocks_override=20)
    assert sum(step.swapped_out for step in swapped.steps) == sum(step.swapped_in for step in swapped.steps) > 0
    system = (("system", 64),)
    shared = pictures.simulated([pictures.item(0, 90, 16, system), pictures.item(4, 80, 20, system)], **small)
    assert sum(len(set(owners)) > 1 for owners in shared.steps[6].held.values()) == 4


def test_seven_tokens_go_through_the_blocks_that_the_page_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    steps = script("docs_pictures").seven_tokens(tmp_path / "seven.jsonl")
    assert [[sequence.table for sequence in step.sequences] for step in steps] == [
        [[1, 0], [1, 0]],
        [[1, 2], [1, 0]],
        [[1, 2, 4], [1, 0, 3]],
    ]
    assert [step.copies for step in steps] == [[], [(0, 2)], []]
    assert [len(step.sequences[0].stored) for step in steps] == [7, 8, 9]
    assert " ".join(steps[0].sequences[1].stored) == "Four score and seven years ago our"
    recorded = (tmp_path / "seven.jsonl").read_text(encoding="utf-8").splitlines()
    kept = (ROOT / "docs" / "recordings" / "seven_tokens.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(recorded) == len(kept) == 1 + 1 + 4


@pytest.mark.slow
def test_the_site_is_made_without_a_broken_link(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs-material is not installed: make site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    pages = {page.name for page in tmp_path.glob("*.html")}
    assert {"index.html", "api.html", "CHANGELOG.html", "scheduling.html"} <= pages
    assert "LLM.generate" in (tmp_path / "api.html").read_text(encoding="utf-8")
    assert 'href="replay/a_busy_half_minute.html"' in (tmp_path / "engine-view.html").read_text(encoding="utf-8")
    replay = (tmp_path / "replay" / "a_busy_half_minute.html").read_text(encoding="utf-8")
    for address in re.findall(r'(?:src|href|data-recording)="([^"/][^"]*)"', replay):
        assert (tmp_path / "replay" / address).is_file(), address
