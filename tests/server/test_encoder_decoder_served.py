"""An encoder-decoder model served: completions of texts, token ids and prompts in two parts; the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.engine.test_encoder_decoders import marian_with_text
from tests.models.seq2seq import save_seq2seq
from tests.models.test_bart import bart
from tests.server.answers import answer_of
from tests.server.running_server import TINY, Running, Serve, running

TEXT = "the quick brown fox jumps over the lazy dog"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that speaks bytes."""
    made = tmp_path_factory.mktemp("bart")
    save_seq2seq(made, bart(vocab_size=258, bos_token_id=0, eos_token_id=1, decoder_start_token_id=1, pad_token_id=0))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, made)
    config = json.loads((made / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def server(folder: Path, start_module_server: Serve) -> Running:
    return start_module_server(folder, "--dtype", "float32")


def test_prompts_of_all_forms(server: Running, folder: Path) -> None:
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=100, max_model_len=64)
    ids = llm.tokenizer.encode(TEXT)
    params = SamplingParams(**GREEDY)
    parts: Any = {"encoder_prompt": TEXT, "decoder_prompt": "abc"}
    plain, begun = llm.generate([TEXT, parts], params, use_tqdm=False)
    assert plain.encoder_prompt == TEXT and plain.encoder_prompt_token_ids == ids
    assert begun.prompt == "abc" and begun.prompt_token_ids == [1, *llm.tokenizer.encode("abc")]
    for prompt, expected in (
        (TEXT, [plain]),
        (ids, [plain]),
        ([TEXT, TEXT], [plain, plain]),
        (parts, [begun]),
        ([{"encoder_prompt": ids}, parts], [plain, begun]),
    ):
        answer = complete(server, prompt)
        assert [choice["text"] for choice in answer["choices"]] == [output.outputs[0].text for output in expected]
        assert answer["usage"]["prompt_tokens"] == sum(output.num_prompt_tokens for output in expected)


def complete(server: Running, prompt: Any, status: int = 200, **fields: Any) -> Any:
    with server.http() as http:
        return answer_of(http, "/v1/completions", status=status, **{"prompt": prompt, **GREEDY, **fields})


def test_a_stream_and_several_choices_and_beams(server: Running) -> None:
    whole = complete(server, TEXT, n=3, temperature=1, seed=5)
    assert len(whole["choices"]) == 3 and whole["usage"]["prompt_tokens"] == len(TEXT) + 1
    with server.http().stream(
        "POST", "/v1/completions", json={"prompt": TEXT, **GREEDY, "stream": True, "echo": False}
    ) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    text = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
    assert text == complete(server, TEXT)["choices"][0]["text"]
    beams = complete(server, TEXT, use_beam_search=True, n=4)
    assert len(beams["choices"]) == 4


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("", {}, "encoder_prompt is empty"),
        ("x" * 97, {}, "has 97 tokens, but may have at most 96"),
        ({"encoder_prompt": ""}, {}, "encoder_prompt is empty"),
        ({"encoder_prompt": "a", "other": 1}, {}, "other"),
        ({"decoder_prompt": "a"}, {}, "encoder_prompt"),
        ("abc", {"suffix": "x"}, "suffix is not supported with encoder-decoder models"),
        ("abc", {"truncate_prompt_tokens": 2}, "truncate_prompt_tokens is not supported with encoder-decoder models"),
    ],
)
def test_refusals(prompt: Any, fields: dict[str, Any], message: str, server: Running) -> None:
    assert message in complete(server, prompt, 400, **fields)["error"]["message"]
    assert complete(server, TEXT)["choices"]


def test_a_chat_needs_a_template(server: Running) -> None:
    response = server.http().post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert response.status_code == 400 and "template" in response.json()["error"]["message"]


def test_two_parts_are_refused_by_a_decoder(tiny_server: Running) -> None:
    answer = complete(tiny_server, {"encoder_prompt": "a"}, 400)
    assert "the model has a decoder alone" in answer["error"]["message"]


def test_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from octavo.cli.main import main

    lines = [
        {"encoder_prompt": TEXT, "decoder_prompt": "abc", "max_tokens": 4},
        {"prompt": TEXT},
        {"encoder_prompt": TEXT, "beam_width": 4, "max_tokens": 5},
        {"decoder_prompt": "abc", "prompt": "x"},
        {"prompt": ""},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["generate", str(folder), "--input", str(file), "--json", "-", "--dtype", "float32"]
    code = main([*arguments, "--num-gpu-blocks-override", "100", "--max-tokens", "6", "--temperature", "0"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code and len(found) == 6
    assert found[0]["encoder_prompt_token_ids"] and len(found[0]["outputs"][0]["token_ids"]) <= 4
    assert found[1]["prompt"] == TEXT and found[1]["prompt_token_ids"] == [1]
    assert len(found[2]["outputs"]) == 4
    assert "decoder_prompt needs encoder_prompt" in found[3]["error"]
    assert "encoder_prompt is empty" in found[4]["error"]
    assert found[5]["summary"]["failed"] == 2


def test_marian_is_served_with_the_tokenizers_of_both_sides(tmp_path: Path) -> None:
    folder = tmp_path / "marian"
    folder.mkdir()
    marian_with_text(folder)
    prompt = {"encoder_prompt": "hello the world", "decoder_prompt": "hallo welt"}
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=100, max_model_len=64)
    [expected] = llm.generate([prompt], SamplingParams(**GREEDY), use_tqdm=False)
    assert expected.num_prompt_tokens == 4 + 3
    with running(folder, tmp_path / "log", *TINY, "--dtype", "float32") as server:
        answer = complete(server, prompt)
    assert answer["usage"]["prompt_tokens"] == expected.num_prompt_tokens
    assert answer["choices"][0]["text"] == expected.outputs[0].text
