"""A network for tests of the whole worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_llama import save_distinct_llama


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose random weights are large enough for logits that differ clearly."""
    return save_distinct_llama(tmp_path_factory.mktemp("network"), vocab_size=64)
