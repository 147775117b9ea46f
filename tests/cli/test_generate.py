from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.inputs import for_output, read_jobs
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.outputs import RequestOutput
from tests.adapters import write_adapter
from tests.cli.helpers import Capture, Run, json_lines
from tests.test_package import script

GREEDY = ("--temperature", "0", "--max-tokens", "6", "--ignore-eos")


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


def test_an_adapter_answers_in_place_of_the_model(
    octavo: Run, capsys: Capture, tiny_model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "fine", tiny_model)
    answers = []
    for flags in ((), ("--lora", folder), ("--lora", f"x={folder}")):
        assert octavo("generate", tiny_model, "Hello", *GREEDY, "--kernels", "reference", *flags) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] != answers[1] == answers[2]
    assert octavo("generate", tiny_model, "Hello", *GREEDY, "--lora", tmp_path / "none") == 2
    assert "none is missing" in capsys.readouterr().err


def test_a_terminal_does_not_obey_what_a_model_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert for_output("\x1b[2J") == "\x1b[2J", "a pipe gets the text as it is"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert for_output("\x1b[2J") == "␛[2J"


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
    system = ("--system", "Be brief.")
    assert octavo("generate", tiny_model, "Hi", "--chat", *system, *GREEDY, "--json", "-") == 0
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert json_lines(capsys.readouterr().out)[0]["outputs"][0]["token_ids"] == reference(messages)
    assert octavo("generate", tiny_model, "Hi", *system) == 2
    assert "--chat" in capsys.readouterr().err


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


def test_beams_and_priorities_come_from_flags_and_from_rows(
    octavo: Run, capsys: Capture, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "Hello", "priority": 2.5},
        {"prompt": "Hello", "beam_width": 3, "length_penalty": 0.5, "early_stopping": True, "max_tokens": 4},
        {"prompt": "Hello", "early_stopping": "never", "beam_width": 2, "priority": -1},
        {"prompt": "Hello", "length_penalty": 0.5},
        {"prompt": "Hello", "beam_width": 2, "temperature": 0.5},
        {"prompt": "Hello", "beam_width": 99},
        {"prompt": "Hello", "priority": True},
        {"prompt": "Hello", "early_stopping": "soon", "beam_width": 2},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    words = ["generate", tiny_model, "--input", file, "--max-tokens", "6", "--json", "-"]
    assert octavo(*words, "--scheduling-policy", "static") == 1
    *lines, _ = json_lines(capsys.readouterr().out)
    assert "error" not in lines[0]
    assert [len(line["outputs"]) for line in lines[:3]] == [1, 3, 2]
    scores = [output["score"] for output in lines[1]["outputs"]]
    assert scores == sorted(scores, reverse=True)
    errors = [line.get("error", "") for line in lines[3:]]
    for error, words_of_it in zip(
        errors, ["beam_width", "temperature", "99", "priority", "early_stopping"], strict=True
    ):
        assert words_of_it in error

    flags = ["--beam-width", "3", "--length-penalty", "0.5", "--early-stopping", "true", "--max-tokens", "4"]
    assert octavo("generate", tiny_model, "Hello", *flags, "--json", "-") == 0
    line, _ = json_lines(capsys.readouterr().out)
    assert line["outputs"] == lines[1]["outputs"]
    assert octavo("generate", tiny_model, "Hello", "--priority", "1.5", "--json", "-") == 1
    assert "scheduling_policy 'fcfs'" in json_lines(capsys.readouterr().out)[0]["error"]
    assert octavo("generate", tiny_model, "Hello", "--beam-width", "3", "--temperature", "0.5") == 2
    assert "temperature" in capsys.readouterr().err


def test_what_policies_look_at_is_given_by_flag_or_line(
    octavo: Run, capsys: Capture, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "Hello", "user": "alice", "ttft_target": 0.5, "tpot_target": 0.1},
        {"prompt": "Hello", "ttft_target": None},
        {"prompt": "Hello", "ttft_target": -1},
        {"prompt": "Hello", "user": 3},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    words = ["generate", tiny_model, "--input", file, "--max-tokens", "3", "--user", "bob", "--json", "-"]
    for policy, accepts in (("deadline", True), ("fair", False)):
        assert octavo(*words, "--scheduling-policy", policy) == 1
        *lines, _ = json_lines(capsys.readouterr().out)
        assert ("error" not in lines[0]) == accepts
        assert "error" not in lines[1]
        assert "ttft_target" in lines[2]["error"] and "user" in lines[3]["error"]


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
    from octavo.cli.flags import read_sampling_params
    from octavo.cli.generate import DEFAULTS, make_parser

    argv = "--temperature 0.5 --top-p 0.9 --top-k 3 --max-tokens none --seed 7 --stop a --stop b --n 2 --logprobs 4"
    argv += ' --stop-token-ids 5,6 --logit-bias {"3":-1} --ignore-eos --no-skip-special-tokens --bad-words w'
    params = read_sampling_params(make_parser().read(argv.split()), DEFAULTS)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 3, None)
    assert (params.seed, params.stop, params.n, params.logprobs) == (7, ["a", "b"], 2, 4)
    assert (params.stop_token_ids, params.logit_bias, params.bad_words) == ([5, 6], {3: -1}, ["w"])
    assert (params.ignore_eos, params.skip_special_tokens, params.min_p) == (True, False, 0.0)
    assert read_sampling_params(make_parser().read([]), DEFAULTS).max_tokens == DEFAULTS["max_tokens"]


def test_engine_flags_reach_the_configuration() -> None:
    from octavo.cli.flags import read_engine_config
    from octavo.cli.generate import make_parser

    argv = "--max-num-seqs 3 --no-enable-chunked-prefill --engine-seed 9 --seed 1 --dtype float32 --max-model-len none"
    config = read_engine_config(make_parser().read(argv.split()), "m")
    assert (config.max_num_seqs, config.enable_chunked_prefill, config.seed) == (3, False, 9)
    assert (config.dtype, config.max_model_len) == ("float32", None)


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.cli.flags import read_engine_config
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


def documented(action: argparse.Action) -> str | None:
    """The default that a flag's help names."""
    found = re.search(r"\(default: (.*)\)$", action.help or "")
    return found[1] if found else None


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_documented_defaults_are_the_real_ones(command: str) -> None:
    from octavo.cli.flags import read_sampling_params
    from octavo.core.sampling_params import SamplingParams, parameters

    module = importlib.import_module(f"octavo.cli.{command}")
    parser = module.make_parser()
    params = read_sampling_params(parser.read([]), module.DEFAULTS)
    flags = {a.dest.removeprefix("sampling:"): a for a in parser._actions if a.dest.startswith("sampling:")}
    flags = {
        name: action for name, action in flags.items() if name in parameters(SamplingParams)
    }  # not those of beam search
    assert flags
    for name, action in flags.items():
        real = getattr(params, name)
        named = None if real is None and name != "max_tokens" else str(real).replace("None", "none")
        assert documented(action) == named
    page = script("reference_pages").options()
    rows = dict(re.findall(r"^\| `(\w+)` ((?:\| `[^`|]*` ){3}\|) ", page, re.MULTILINE))
    column = 1 + ["python", "generate", "chat"].index(command)
    for name in parameters(SamplingParams):
        shown = rows[name].split("|")[column].strip().strip("`").lower()
        assert shown == (str(getattr(params, name)).lower() if name in flags else "-")


def test_a_models_own_defaults_hold_for_flags_that_are_left_out(
    octavo: Run, capsys: Capture, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 6}')
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n{"prompt": "Hello", "max_tokens": 3}\n')
    flags = ("--generation-config", tmp_path, "--ignore-eos")
    assert octavo("generate", tiny_model, "--input", tmp_path / "prompts.jsonl", "--json", "-", *flags) == 0
    own = [line["outputs"][0]["token_ids"] for line in json_lines(capsys.readouterr().out)[:2]]
    assert octavo("generate", tiny_model, "Hello", "--json", "-", *GREEDY) == 0
    named = json_lines(capsys.readouterr().out)[0]["outputs"][0]["token_ids"]
    assert own == [named, named[:3]]
    assert octavo("generate", tiny_model, "Hello", "--max-tokens", "2", "--json", "-", *flags) == 0
    assert json_lines(capsys.readouterr().out)[0]["outputs"][0]["token_ids"] == named[:2]
    assert octavo("chat", tiny_model, *flags, stdin="Hello\n") == 0
    streamed = capsys.readouterr().out
    assert octavo("generate", tiny_model, "--chat", "Hello", *GREEDY) == 0
    assert capsys.readouterr().out == streamed


def test_the_text_of_one_prompt_grows_on_a_terminal(
    octavo: Run, capsys: Capture, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.engine.llm_engine import LLMEngine

    assert octavo("generate", tiny_model, "Hello", *GREEDY) == 0
    text = capsys.readouterr().out
    shown: list[str] = []
    step = LLMEngine.step

    def watched(engine: LLMEngine) -> list[RequestOutput]:
        shown.append(capsys.readouterr().out)
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", watched)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert octavo("generate", tiny_model, "Hello", *GREEDY) == 0
    last = capsys.readouterr()
    assert "".join(shown) + last.out == text
    assert len([piece for piece in shown if piece]) > 2
    assert "1 request, 5 tokens in, 6 out in" in last.err
    shown.clear()
    assert octavo("generate", tiny_model, "Hello", "World", *GREEDY) == 0
    assert not any(shown), "several are shown one after the other, each when it has ended"
    assert octavo("generate", tiny_model, "x" * 1000, *GREEDY) == 1
    assert "octavo: error: prompt 1: prompt has" in capsys.readouterr().err


def test_the_default_of_max_tokens_ends_at_the_context_and_a_named_one_is_refused(
    octavo: Run, capsys: Capture, tiny_model: Path
) -> None:
    prompt = "x" * 200  # of 256, and the default is 128
    assert octavo("generate", tiny_model, prompt, "--ignore-eos", "--json", "-") == 0
    line, _ = json_lines(capsys.readouterr().out)
    assert len(line["outputs"][0]["token_ids"]) == 56
    assert octavo("generate", tiny_model, prompt, "--max-tokens", "57") == 1
    assert "max_tokens: 57 does not fit" in capsys.readouterr().err


@pytest.fixture
def without_weights(tiny_model: Path, tmp_path: Path) -> Path:
    """The model without weights, which shows what is refused before they are read."""
    return shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))


@pytest.mark.parametrize(
    ("prompts", "flags", "says"),
    [
        ([""], [], "prompt is empty"),
        (["Hello"], ["--regex", "a("], "structured_outputs.regex: unclosed group"),
        (["Hello"], ["--max-tokens", "1000"], "max_tokens: 1000 does not fit"),
        (["x" * 300], [], "prompt has 300 tokens, but prompt and output together may have at most 256"),
        (["", ""], [], "octavo: error: prompt 2: prompt is empty"),
        (["Hello"], ["--chat", "--chat-template", "none.jinja"], "cannot read chat_template none.jinja: No such file"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused_before_weights_are_read(
    octavo: Run, capsys: Capture, without_weights: Path, prompts: list[str], flags: list[str], says: str
) -> None:
    assert octavo("generate", without_weights, *prompts, *flags) != 0
    assert says in capsys.readouterr().err


def test_a_conversation_without_a_template_is_refused_before_weights_are_read(
    octavo: Run, capsys: Capture, without_weights: Path
) -> None:
    (without_weights / "chat_template.jinja").unlink()
    for words in (("generate", without_weights, "--chat", "Hello"), ("chat", without_weights)):
        assert octavo(*words) != 0
        assert "no chat template (it may be a base model)" in (said := capsys.readouterr().err)
        assert "--chat-template FILE" in said
    template = without_weights / "mine.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    assert octavo("chat", without_weights, "--chat-template", template, "--regex", "a(") == 2
    assert "structured_outputs.regex: unclosed group" in capsys.readouterr().err


def test_a_template_of_ones_own_takes_the_place_of_the_models(
    octavo: Run, capsys: Capture, tiny_model: Path, tmp_path: Path
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    words = ("generate", tiny_model, *GREEDY, "--json", "-", "--chat", "Hello")
    assert octavo(*words, "--chat-template", template) == 0
    line, _ = json_lines(capsys.readouterr().out)
    assert octavo("generate", tiny_model, *GREEDY, "--json", "-", "<Hello>") == 0
    plain, _ = json_lines(capsys.readouterr().out)
    assert line["prompt_token_ids"] == plain["prompt_token_ids"]
    template.write_text("{% for %}")
    assert octavo(*words, "--chat-template", template) == 2
    assert "the chat template is not valid jinja: line 1" in capsys.readouterr().err


def test_a_server_refuses_a_wrong_template_before_the_model_is_looked_for(octavo: Run, capsys: Capture) -> None:
    assert octavo("serve", "no/such-model", "--port", "0", "--chat-template", "none.jinja") == 2
    assert "cannot read chat_template none.jinja: No such file" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (("--json-schema", "schema.json"), r"\[\s*-?\d+(\s*,\s*-?\d+){1,2}\s*\]"),
        (("--choice", "yes", "--choice", "no"), "yes|no"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (("--regex", "[0-9]{2}-[a-z]{3}"), "[0-9]{2}-[a-z]{3}"),
                (("--grammar", "rules.gbnf"), "<[a-c]{3}>"),
                (("--structured-outputs", '{"choice": ["one"]}'), "one"),
            )
        ),
    ],
    ids=str,
)
def test_the_form_of_the_answer_is_given_by_flags(
    octavo: Run,
    capsys: Capture,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    pattern: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text('{"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}')
    Path("rules.gbnf").write_text('root ::= "<" [a-c]{3} ">"')
    assert octavo("generate", tiny_model, "Hello", *flags, "--seed", "1", "--max-tokens", "200") == 0
    assert re.fullmatch(pattern, capsys.readouterr().out.removesuffix("\n")), flags


def test_a_wrong_form_is_refused(octavo: Run, capsys: Capture, tiny_model: Path, tmp_path: Path) -> None:
    for flags, words in (
        (("--choice", "a", "--regex", "b"), "not allowed with argument --choice"),
        (("--json-schema", tmp_path / "none.json"), "cannot read"),
        (("--regex", "a("), "structured_outputs.regex: unclosed group"),
        (("--regex", "a", "--beam-width", "2"), "not of beam search"),
    ):
        assert octavo("generate", tiny_model, "Hello", *flags) != 0
        assert words in capsys.readouterr().err


def test_prompts_may_be_a_column_of_a_parquet_file(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"prompt": ["a", None, "c"], "id": [1, 2, 3]}), tmp_path / "prompts.parquet")
    jobs = read_jobs(["word"], str(tmp_path / "prompts.parquet"), {}, as_chat=False)
    assert [job.prompt for job in jobs if job.error is None] == ["word", "a", "c"]
    assert jobs[2].error is not None and jobs[2].index == 2
