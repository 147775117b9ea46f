"""Validation of sampling parameters: refused values, their messages, and accepted values."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import pytest

from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import SamplingParams, defaults_beside, parameter, parameters
from tests.test_package import script

NUMBERS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
FLAGS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")

REFUSED: list[tuple[str, Any]] = [
    *((name, value) for name in NUMBERS for value in (math.nan, math.inf, -math.inf, True, "1", [1], 10**400, 1j)),
    *((name, None) for name in NUMBERS),
    *((name, value) for name in INTEGERS for value in (True, 1.0, "1", [1], math.nan)),
    *((name, value) for name in FLAGS for value in (1, 0, None, "true")),
    ("n", 0),
    ("n", -1),
    ("n", 257),
    ("presence_penalty", -2.01),
    ("presence_penalty", 2.01),
    ("frequency_penalty", -2.01),
    ("frequency_penalty", 2.01),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("temperature", -0.1),
    ("top_p", 0),
    ("top_p", -0.5),
    ("top_p", 1.01),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("min_tokens", 17),  # more than the default of max_tokens
    ("min_tokens", None),
    ("logprobs", -2),
    ("prompt_logprobs", -2),
    ("stop", [""]),
    ("stop", ""),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop", ["a"] * 65),
    ("bad_words", "word"),
    ("bad_words", [None]),
    ("bad_words", [""]),
    ("bad_words", ["a"] * 65),
    *(
        (name, value)
        for name in ("stop_token_ids", "allowed_token_ids")
        for value in (5, "5", [-1], [1.0], [True], ["1"], [None], {1: 2})
    ),
    ("allowed_token_ids", []),
    ("logit_bias", [1, 2]),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1.5: 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {None: 1.0}),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", {1: -100.5}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: "1"}),
    ("logit_bias", {1: True}),
    ("logits_processors", [1]),
    ("logits_processors", print),
    ("logits_processors", 5),
]


def short(value: object) -> str:
    return repr(value)[:20]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[f"{n}={short(v)}" for n, v in REFUSED])
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        SamplingParams(**{name: value})


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_the_message_says_value_and_range() -> None:
    with pytest.raises(InvalidRequestError, match=r"top_p must be in \(0, 1\], not 1.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(InvalidRequestError, match="repetition_penalty must be greater than 0, not 0"):
        SamplingParams(repetition_penalty=0)
    with pytest.raises(InvalidRequestError, match=r"max_tokens must be at least 0, not -1"):
        SamplingParams(max_tokens=-1)


@pytest.mark.parametrize(
    "options",
    [
        dict(n=256, presence_penalty=-2, frequency_penalty=2, repetition_penalty=1e-3, temperature=0),
        dict(temperature=100, top_p=1, top_k=-1, min_p=1, seed=-(2**63)),
        dict(top_p=1e-9, top_k=10**9, min_p=0, seed=2**64 - 1, max_tokens=None, min_tokens=10**6),
        dict(min_tokens=16, logprobs=0, prompt_logprobs=100),
        dict(stop=["a"] * 64, bad_words=["b"], stop_token_ids=[], allowed_token_ids=[0]),
        dict(logit_bias={0: 100, 5: -100.0}, logits_processors=[lambda o, x: x]),
    ],
)
def test_the_ends_of_each_range_are_accepted(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    for name, value in options.items():
        assert getattr(params, name) == value


def test_one_stop_string_becomes_a_list_and_text_keys_become_token_ids() -> None:
    params = SamplingParams(stop="###", logit_bias={"50256": -100})  # type: ignore[dict-item]
    assert params.stop == ["###"]
    assert params.logit_bias == {50256: -100}


def test_a_field_assigned_later_is_checked_by_validate() -> None:
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(InvalidRequestError, match="temperature"):
        params.validate()


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False), (0.5, False), (1.0, False)]
)
def test_a_temperature_below_the_minimum_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_parameters_survive_serialisation() -> None:
    params = SamplingParams(
        temperature=0.3, top_k=5, logit_bias={7: 1.5}, stop="a", seed=2**64 - 1, allowed_token_ids=[1, 2], logprobs=2
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params


def test_a_models_min_p_holds_beside_its_own_temperature_alone() -> None:
    defaults = {"temperature": 0.2, "top_p": 0.9, "min_p": 0.9}
    assert defaults_beside((), defaults) == defaults
    assert defaults_beside(("top_p",), defaults) == {"temperature": 0.2, "min_p": 0.9}
    assert defaults_beside(("temperature",), defaults) == {"top_p": 0.9}


# One declaration: flags, bodies, checks and pages are made of it.


class MoreParams(SamplingParams, kw_only=True):
    new_penalty: Annotated[float, parameter("A penalty of tomorrow.", 0.0, 2.0)] = 0.0
    new_ids: Annotated[list[int] | None, parameter("Ids of tomorrow.")] = None


def test_a_new_parameter_is_its_declaration() -> None:
    from pydantic import ValidationError, create_model

    from octavo.cli.flags import add_parameters
    from octavo.cli.parsing import Parser
    from octavo.server.fields import RequestModel
    from octavo.server.openai.protocol import parameter_fields

    assert MoreParams(new_penalty=2.0, new_ids=[1]).new_penalty == 2.0
    for wrong in ({"new_penalty": 2.1}, {"new_penalty": None}, {"new_ids": [-1]}, {"new_ids": "1"}):
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))) as raised:
            MoreParams(**wrong)
        assert raised.value.path == next(iter(wrong))
    parser = Parser(prog="octavo")
    new = {name: declared for name, declared in parameters(MoreParams).items() if name.startswith("new_")}
    add_parameters(parser, new)
    assert parser.read(["--new-penalty", "1.5", "--new-ids", "3,4"]).group("sampling") == {
        "new_penalty": 1.5, "new_ids": [3, 4],
    }  # fmt: skip
    assert "A penalty of tomorrow. (default: 0.0)" in " ".join(parser.format_help().split())
    body = create_model("Body", __base__=RequestModel, **parameter_fields(MoreParams, new))
    assert body.model_validate({"new_penalty": 1, "new_ids": None}).model_dump() == {"new_penalty": 1, "new_ids": None}
    with pytest.raises(ValidationError):
        body.model_validate({"new_ids": ["1"]})
    assert body.model_fields["new_ids"].description == "Ids of tomorrow."


def test_each_parameter_has_its_description_as_flag_in_bodies_and_on_the_page() -> None:
    from octavo.cli.generate import make_parser
    from octavo.server.openai.protocol import ChatCompletionRequest

    flags = {action.option_strings[0]: action.help for action in make_parser()._actions}
    page = script("reference_pages").options()
    elsewhere = {"logprobs", "detokenize", "extra_args", "structured_outputs", "truncate_prompt_tokens"}
    for name, declared in parameters(SamplingParams).items():
        help_text = flags["--" + name.replace("_", "-")]
        assert help_text is not None and help_text.startswith(declared.description)
        assert f"| `{name}` |" in page and declared.description.replace("|", "\\|") in page
        if name not in elsewhere:
            assert ChatCompletionRequest.model_fields[name].description == declared.description
