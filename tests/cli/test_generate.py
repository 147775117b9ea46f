from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.prompts import read_jobs
from octavo.core.errors import ConfigError, InvalidRequestError

Run = Callable[..., int]
Capture = pytest.CaptureFixture[str]

GREEDY = ("--temperature", "0", "--max-tokens", "6", "--ignore-eos")


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Callable[..., list[int]]:
    """Greedy continuation by transformers: text or token ids to token ids."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def generate(prompt: str | list[int] | list[dict[str, str]], count: int = 6) -> list[int]:
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        elif isinstance(prompt[0], dict):
            text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = list(prompt)
        start = len(ids)
        for _ in range(count):
            with torch.inference_mode():
                ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        return ids[start:]

    return generate


def test_prompts_of_the_command_line_are_completed_in_order(
    octavo: Run, capsys: Capture, tiny_model: Path, reference: Callable[..., list[int]]
) -> None:
    assert octavo("generate", tiny_model, "Hello", *GREEDY, "good morning", "--json", "-") == 0
    *lines, last = json_lines(capsys.readouterr().out)
    assert [line["prompt"] for line in lines] == ["Hello", "good morning"]
    for line in lines:
        assert line["outputs"][0]["token_ids"] == reference(line["prompt"])
        assert line["outputs"][0]["finish_reason"] == "length"
        assert 0 <= line["metrics"]["first_token_seconds"] <= line["metrics"]["total_seconds"]
    summary = last["summary"]
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (2, 0, 12)
    assert summary["prompt_tokens"] == sum(len(line["prompt_token_ids"]) for line in lines)
    assert summary["output_tokens_per_second"] == pytest.approx(12 / summary["seconds"])


def test_one_prompt_prints_its_text_alone_and_the_speed_to_standard_error(
    octavo: Run, capsys: Capture, tiny_model: Path
) -> None:
    assert octavo("generate", tiny_model, "Hello", *GREEDY, "--json", "-") == 0
    text = json_lines(capsys.readouterr().out)[0]["outputs"][0]["text"]
    assert octavo("generate", tiny_model, "Hello", *GREEDY) == 0
    captured = capsys.readouterr()
    assert captured.out == text + "\n"
    assert captured.err.count("\n") == 1
    assert "1 request, 5 tokens in, 6 out in" in captured.err


def test_several_texts_are_told_apart(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    assert octavo("generate", tiny_model, "Hello", "two\nlines", *GREEDY) == 0
    out = capsys.readouterr().out
    assert "=== 1: Hello\n" in out
    assert "=== 2: two lines\n" in out


def test_n_completions_are_printed_with_their_numbers(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    assert octavo("generate", tiny_model, "Hello", "--n", "2", "--seed", "1", "--max-tokens", "3") == 0
    out = capsys.readouterr().out
    assert "=== 1.1: Hello\n" in out
    assert "=== 1.2: Hello\n" in out


def test_the_chat_template_is_used_when_asked_for(
    octavo: Run, capsys: Capture, tiny_model: Path, reference: Callable[..., list[int]]
) -> None:
    assert octavo("generate", tiny_model, "Hi", "--chat", *GREEDY, "--json", "-") == 0
    line = json_lines(capsys.readouterr().out)[0]
    assert line["outputs"][0]["token_ids"] == reference([{"role": "user", "content": "Hi"}])


def test_a_json_file_gives_each_line_its_own_parameters(
    octavo: Run, capsys: Capture, tiny_model: Path, tmp_path: Path, reference: Callable[..., list[int]]
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        json.dumps({"prompt": "Hello", "max_tokens": 2})
        + "\n\n"
        + json.dumps({"prompt_token_ids": [5, 6, 7]})
        + "\n"
        + json.dumps({"messages": messages, "logprobs": 1})
        + "\n"
    )
    target = tmp_path / "answers.jsonl"
    assert octavo("generate", tiny_model, "--input", file, *GREEDY, "--json", target) == 0
    assert capsys.readouterr().out == ""
    first, second, third, _ = json_lines(target.read_text())
    assert first["outputs"][0]["token_ids"] == reference("Hello", 2)
    assert second["outputs"][0]["token_ids"] == reference([5, 6, 7])
    assert third["outputs"][0]["token_ids"] == reference(messages)
    chosen = third["outputs"][0]["token_ids"][0]
    assert third["outputs"][0]["logprobs"][0][str(chosen)]["rank"] == 1
    assert third["outputs"][0]["logprobs"][0][str(chosen)]["logprob"] < 0


def test_a_bad_prompt_among_many_fails_alone(
    octavo: Run, capsys: Capture, tiny_model: Path, tmp_path: Path, reference: Callable[..., list[int]]
) -> None:
    bad = [
        '{"prompt": "x", "temprature": 1}',
        '{"prompt": "x", "temperature": -1}',
        '{"prompt": "x"',
        '{"prompt": "x", "prompt_token_ids": [1]}',
        '{"prompt_token_ids": [99999]}',
        '{"prompt_token_ids": "text"}',
        '{"prompt": ["x"], "max_tokens": 2}',
        "[1, 2]",
        json.dumps({"prompt": "x" * 1000}),
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(['{"prompt": "Hello"}', *bad, '{"prompt": "Bye"}']))
    assert octavo("generate", tiny_model, "--input", file, *GREEDY, "--json", "-") == 1
    *lines, last = json_lines(capsys.readouterr().out)
    assert [line["index"] for line in lines] == list(range(len(bad) + 2))
    assert lines[0]["outputs"][0]["token_ids"] == reference("Hello")
    assert lines[-1]["outputs"][0]["token_ids"] == reference("Bye")
    errors = [str(line.get("error", "")) for line in lines[1:-1]]
    assert all(errors)
    assert "did you mean 'temperature'?" in errors[0]
    assert "-1" in errors[1]
    assert "not valid JSON" in errors[2]
    assert "99999" in errors[4]
    assert last["summary"]["failed"] == len(bad)


def test_errors_are_reported_beside_the_texts(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    assert octavo("generate", tiny_model, "Hello", "x" * 1000, *GREEDY) == 1
    captured = capsys.readouterr()
    assert "=== 1: Hello\n" in captured.out
    assert "octavo: error: prompt 2: " in captured.err
    assert ", 1 failed," in captured.err


def test_prompts_are_read_from_a_pipe(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    assert octavo("generate", tiny_model, *GREEDY, "--json", "-", stdin="Hello\n\nÉté\r\n") == 0
    assert [line.get("prompt") for line in json_lines(capsys.readouterr().out)] == ["Hello", "Été", None]


def test_a_pipe_of_json_lines_is_recognised(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    assert octavo("generate", tiny_model, *GREEDY, "--json", "-", stdin='{"prompt": "Hello"}\n') == 0
    assert json_lines(capsys.readouterr().out)[0]["prompt"] == "Hello"


def test_the_model_may_come_from_flag_variable_or_file(
    octavo: Run, capsys: Capture, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert octavo("generate", "Hello", "--model", tiny_model, *GREEDY) == 0
    config = tmp_path / "octavo.yaml"
    config.write_text(f"model: {tiny_model}\nmax-num-seqs: 4\n")
    assert octavo("generate", "--config", config, *GREEDY, stdin="Hello\n") == 0
    monkeypatch.setenv("OCTAVO_MODEL", str(tiny_model))
    assert octavo("generate", *GREEDY, stdin="Hello\n") == 0
    texts = capsys.readouterr().out.splitlines()
    assert len(texts) >= 3
    assert texts[: len(texts) // 3] * 3 == texts


def test_words_after_two_hyphens_are_prompts(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    assert octavo("generate", tiny_model, *GREEDY, "--json", "-", "--", "--help") == 0
    assert json_lines(capsys.readouterr().out)[0]["prompt"] == "--help"


def test_sampling_flags_reach_the_request() -> None:
    from octavo.cli.generate import DEFAULTS, make_parser
    from octavo.cli.sampling_flags import read_sampling_params

    argv = "--temperature 0.5 --top-p 0.9 --top-k 3 --max-tokens none --seed 7 --stop a --stop b --n 2 --logprobs 4"
    argv += ' --stop-token-ids 5,6 --logit-bias {"3":-1} --ignore-eos --no-skip-special-tokens --bad-words w'
    params = read_sampling_params(make_parser().read(argv.split()), DEFAULTS)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 3, None)
    assert (params.seed, params.stop, params.n, params.logprobs) == (7, ["a", "b"], 2, 4)
    assert (params.stop_token_ids, params.logit_bias, params.bad_words) == ([5, 6], {3: -1}, ["w"])
    assert (params.ignore_eos, params.skip_special_tokens, params.min_p) == (True, False, 0.0)
    assert read_sampling_params(make_parser().read([]), DEFAULTS).max_tokens == DEFAULTS["max_tokens"]


def test_engine_flags_reach_the_configuration() -> None:
    from octavo.cli.engine_flags import read_engine_config
    from octavo.cli.generate import make_parser

    argv = "--max-num-seqs 3 --no-enable-chunked-prefill --engine-seed 9 --seed 1 --dtype float32 --max-model-len none"
    config = read_engine_config(make_parser().read(argv.split()), "m")
    assert (config.max_num_seqs, config.enable_chunked_prefill, config.seed) == (3, False, 9)
    assert (config.dtype, config.max_model_len) == ("float32", None)


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.cli.engine_flags import read_engine_config
    from octavo.cli.generate import make_parser

    monkeypatch.setenv("OCTAVO_BLOCK_SIZE", "8")
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "5")
    config = read_engine_config(make_parser().read(["--block-size", "4"]), "m")
    assert (config.block_size, config.max_num_seqs) == (4, 5)


def test_wrong_parameters_for_all_prompts_are_refused_at_once() -> None:
    with pytest.raises(InvalidRequestError, match="top_p"):
        read_jobs(["x"], None, {"top_p": 2.0}, as_chat=False)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_jobs([], str(file), {}, as_chat=False)


def test_a_text_file_keeps_lines_that_only_look_like_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('{"a": 1}\n{"prompt": "x"}\n')
    assert [job.prompt for job in read_jobs([], str(file), {}, as_chat=False)] == ['{"a": 1}', '{"prompt": "x"}']


def test_what_the_engine_got_is_said_if_asked_for(
    octavo: Run, capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("generate", tiny_model, "x", "--max-tokens", 1, "--num-gpu-blocks-override", 40)
    assert octavo(*words) == 0
    assert "KV cache" not in capsys.readouterr().err
    assert octavo(*words, "--verbose") == 0
    said = capsys.readouterr()
    assert "octavo: INFO: KV cache: 40 blocks of 16 tokens" in said.err
    assert "KV cache" not in said.out
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "info")
    assert octavo(*words) == 0
    assert "KV cache: 40" in capsys.readouterr().err
