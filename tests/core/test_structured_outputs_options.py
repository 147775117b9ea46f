"""The option ``structured_outputs_config``, from every source."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.engine_config import make_config
from octavo.config.sources import resolve_config
from octavo.core.errors import ConfigError

COMPACT = {"backend": "xgrammar", "disable_any_whitespace": True, "disable_additional_properties": False}


@pytest.mark.parametrize("given", [COMPACT, str(COMPACT).replace("'", '"').replace("T", "t").replace("F", "f")])
def test_fields_are_read_from_a_mapping_and_from_text(given: Any) -> None:
    for config in (
        make_config(model="m", structured_outputs_config=given),
        resolve_config({"model": "m", "structured_outputs_config": given}, environ={}),
    ):
        assert config.structured_outputs_config.model_dump() == {**COMPACT, "disable_fallback": False}


@pytest.mark.parametrize("given", [None, {}, {"disable_any_whitespace": None}])
def test_objects_are_closed_by_default(given: Any) -> None:
    config = make_config(model="m", structured_outputs_config=given).structured_outputs_config
    assert config.disable_additional_properties and not config.disable_any_whitespace


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"disable_any_whitspace": True}, "unknown field .*did you mean 'disable_any_whitespace'"),
        ({"disable_any_whitespace": 1}, "disable_any_whitespace: .*not 1"),
        ("xgrammar", "it must be a mapping such as"),
    ],
)
def test_what_is_wrong_is_named(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(model="m", structured_outputs_config=given)
