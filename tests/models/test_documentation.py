"""The pages on models: code is that of the repository, the table has the networks of the registry."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.models.registry import supported_architectures

ROOT = Path(__file__).parents[2]


def test_the_guide_to_new_models_shows_the_files_as_they_are() -> None:
    code = "\n".join(
        file.read_text() for folder in ("octavo", "tests") for file in (ROOT / folder / "models").glob("*.py")
    )
    guide = (ROOT / "docs" / "adding-a-model.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) >= 5
    assert [block for block in blocks if block not in code] == []


def test_the_table_of_architectures_is_the_registry() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    table = page.partition("## Architectures")[2].partition("\n\nAn architecture may")[0]
    names = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    listed = [name for row in names for name in row]
    assert sorted(listed) == supported_architectures()
