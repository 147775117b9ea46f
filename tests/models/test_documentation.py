"""The code that docs/adding-a-model.md shows is that of the repository."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_guide_to_new_models_shows_the_files_as_they_are() -> None:
    code = "\n".join(
        file.read_text() for folder in ("octavo", "tests") for file in (ROOT / folder / "models").glob("*.py")
    )
    guide = (ROOT / "docs" / "adding-a-model.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) >= 5
    assert [block for block in blocks if block not in code] == []
