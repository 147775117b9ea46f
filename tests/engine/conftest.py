"""What tests of the engine share: transformers' own network of the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def reference(demo_model: Path) -> Any:
    """The demo model in transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
