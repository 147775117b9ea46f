"""Whatever a network of random weights says: outputs held to a schema or pattern are of that form."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.loader.resolve import resolve_model
from tests.grammar_cases import SCHEMAS, generate, load, regex_form

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

PATTERNS = [
    r"[a-z]{3,9}@[a-z]{2,6}\.(com|org)",
    r"([0-9]{1,3}\.){3}[0-9]{1,3}",
    r"(?i)(yes|no|perhaps)",
    r"[^\n]{1,20}",
    r"[À-ÿ]{2,8}( [a-zà-ÿ]{2,8})?",
]
CHOICES = ["small", "medium", "large", "extra large", "élan", "日本"]


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's vocabulary with a tiny network of random weights."""
    folder = tmp_path_factory.mktemp("random")
    demo = resolve_model("smollm2-135m")
    for file in demo.glob("*token*"):
        shutil.copy(file, folder)
    config = json.loads((demo / "config.json").read_text())
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({**config, **sizes, "num_key_value_heads": 2, "head_dim": 16}))
    return folder


def check(llm: LLM, count: int) -> None:
    forms: list[tuple[StructuredOutputsParams, object]] = []
    for i, schema in enumerate(SCHEMAS):
        forms.append((StructuredOutputsParams(json=schema, disable_any_whitespace=bool(i % 3 == 2) or None), schema))
    forms += [(regex_form(pattern), pattern) for pattern in PATTERNS]
    forms.append((StructuredOutputsParams(choice=CHOICES), CHOICES))
    work = [forms[i % len(forms)] for i in range(count)]
    params = [SamplingParams(temperature=1.5, seed=seed, max_tokens=400) for seed in range(count)]
    outputs = generate(llm, [f"Number {i}:" for i in range(count)], params, [form for form, _ in work])
    texts = set()
    for output, (_, wanted) in zip(outputs, work, strict=True):
        found = output.outputs[0]
        assert found.finish_reason == "stop", (wanted, found)
        texts.add(found.text)
        if isinstance(wanted, str):
            assert re.fullmatch(wanted, found.text), (wanted, found.text)
        elif wanted is CHOICES:
            assert found.text in CHOICES
        else:
            value = json.loads(found.text)
            Draft202012Validator(wanted, format_checker=FormatChecker()).validate(value)
    assert len(texts) > count / 3


def test_outputs_at_a_high_temperature(random_model: Path) -> None:
    check(load(random_model, load_format="dummy", max_model_len=420, num_gpu_blocks_override=4000), 46)


@pytest.mark.slow
def test_a_thousand_outputs_at_a_high_temperature(random_model: Path) -> None:
    options = {"num_gpu_blocks_override": 8000, "max_num_seqs": 64}
    check(load(random_model, load_format="dummy", max_model_len=420, **options), 1000)
