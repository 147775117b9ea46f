"""What a caller may say of a request: made from keywords, checked once, and sent whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.core.errors import AdapterError, InvalidRequestError
from octavo.core.outputs import PoolingParams
from octavo.core.request import (
    KEYWORDS,
    EngineCoreRequest,
    LoRARequest,
    Pool,
    PromptAdapterRequest,
    RequestOptions,
    options_for_each,
    options_from_keywords,
)
from octavo.engine.messages import Add, ToCore


def test_keywords_are_the_fields_and_none_is_the_default() -> None:
    assert {"priority", "user", "lora_request", "prompt_adapter_request", "prediction"} <= KEYWORDS
    assert options_from_keywords("generate", dict.fromkeys(KEYWORDS)) == RequestOptions()
    known = RequestOptions(priority=3, user="me")
    assert options_from_keywords("generate", {"user": "you", "tokenization_kwargs": None}, known) == RequestOptions(
        priority=3, user="you"
    )
    for unknown in ("prioritty", "pin_as"):
        with pytest.raises(TypeError, match=rf"generate\(\) got an unexpected keyword argument '{unknown}'"):
            options_from_keywords("generate", {unknown: "x"})
    with pytest.raises(AttributeError):
        known.user = "you"  # type: ignore[misc]


def test_a_request_has_one_adapter() -> None:
    lora, prompt = LoRARequest("a", 1, "x"), PromptAdapterRequest("b", 2, "y")
    assert options_from_keywords("generate", {"prompt_adapter_request": prompt}).lora_request is prompt
    with pytest.raises(AdapterError, match="one adapter"):
        options_from_keywords("generate", {"prompt_adapter_request": prompt, "lora_request": lora})


def test_one_value_is_for_all_and_a_list_has_one_for_each() -> None:
    made = options_for_each("generate", {"priority": [1, 2], "user": "me", "prediction": [5, 6, 7]}, 2)
    assert [(o.priority, o.user, o.prediction) for o in made] == [(1, "me", [5, 6, 7]), (2, "me", [5, 6, 7])]
    made = options_for_each("generate", {"prediction": [[5], "text"], "ttft_target": (None, 1.0)}, 2)
    assert [(o.prediction, o.ttft_target) for o in made] == [([5], None), ("text", 1.0)]
    with pytest.raises(
        InvalidRequestError, match="user must be one for all prompts or one for each of the 2, not 3 of"
    ):
        options_for_each("generate", {"user": ["a", "b", "c"]}, 2)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("priority", float("nan"), "priority must be a finite number"),
        ("priority", True, "priority must be a finite number"),
        ("user", 3, "user must be text, not 3"),
        ("cache_salt", b"x", "cache_salt must be text"),
        ("client", None, "client must be text"),
        ("ttft_target", 0, "ttft_target must be above 0 seconds"),
        ("tpot_target", -1.0, "tpot_target must be at least 0"),
        ("prediction", 7, "prediction must be text or a list of token ids"),
        ("arrival_time", 1e12, "arrival_time must be a past moment"),
        ("arrival_time", "now", "arrival_time must be a past moment"),
    ],
)
def test_a_wrong_value_is_refused_when_the_options_are_made(field: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        RequestOptions(**{field: value})


def test_they_are_sent_whole() -> None:
    options = RequestOptions(priority=2.5, user="me", ttft_target=0.5, tpot_target=0.1, cache_salt="x", pin_as="p")
    request = EngineCoreRequest(
        group_id=0, prompt_token_ids=[1], task=Pool(PoolingParams(task="embed")), options=options
    )
    message = msgspec.msgpack.Decoder(ToCore).decode(msgspec.msgpack.encode(Add(request)))
    assert isinstance(message, Add) and message.request.options == options
