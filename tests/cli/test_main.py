from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import octavo as package
from octavo.cli.main import COMMANDS
from octavo.runner import memory
from octavo.runner.memory import MemoryLimit
from tests.busy_machine import PATIENCE, held_up, once_in_three
from tests.cli.helpers import Run

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRON = {k: v for k, v in os.environ.items() if not k.startswith(("OCTAVO_", "PYTHON"))} | {"PYTHONPATH": str(ROOT)}


def program(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo", *argv]
    return subprocess.run(  # type: ignore[call-overload]
        command, capture_output=True, text=True, timeout=PATIENCE, **{"env": ENVIRON, **options}
    )


@pytest.mark.slow
def test_help_is_shown_within_a_tenth_of_a_second() -> None:
    def once() -> float:
        start = time.perf_counter()
        command = [sys.executable, "-m", "octavo", "--help"]
        process = subprocess.Popen(command, env=ENVIRON, stdout=subprocess.DEVNULL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # what it leaves to be read goes with ``wait``
        seconds = time.perf_counter() - start - held_up(process.pid)
        assert process.wait() == 0
        return seconds

    def measure() -> dict[str, bool]:
        seconds = [once() for _ in range(5)]
        return {f"one of {seconds} s is below 0.1 s": min(seconds) < 0.1}

    once_in_three(measure)


def test_the_top_level_parser_imports_nothing_heavy() -> None:
    code = (
        "import sys; from octavo.cli.main import make_parser; make_parser().format_help();"
        "print([m for m in ('torch', 'pydantic', 'transformers', 'numpy', 'yaml') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], env=ENVIRON, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_the_help_of_a_command_shows_an_example_and_loads_no_torch() -> None:
    code = (
        "import sys; from octavo.cli.main import COMMANDS, main\n"
        "for command in COMMANDS:\n"
        "    main([command, '--help'])\n"
        "    print('torch' in sys.modules, end='\\f')"
    )
    result = subprocess.run([sys.executable, "-c", code], env=ENVIRON, capture_output=True, text=True)
    *helps, rest = result.stdout.split("\f")
    assert rest == "", result.stderr
    for command, text in zip(COMMANDS, helps, strict=True):
        assert f"  octavo {command} " in text or f"  octavo {command}\n" in text
        assert "example" in text
        assert text.endswith("False"), command


@pytest.mark.parametrize("command", [*COMMANDS, ""])
def test_help_texts_say_it_once_and_in_the_words_of_flags(
    command: str, octavo: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo(*command.split(), "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert not re.search(r"most \w+iest|more \w+ier", text, re.IGNORECASE)
    assert "null" not in text, "a flag or variable is reset by none"
    if "MODEL" in text.partition("options:")[0]:
        assert "[MODEL]" in text, "the configuration may name it"


@pytest.mark.parametrize("command", ["generate", "info"])
def test_commands_that_report_figures_can_write_json(
    command: str, octavo: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo(command, "--help") == 0
    assert "--json PATH|-" in capsys.readouterr().out


def test_version(octavo: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo("--version") == 0
    assert capsys.readouterr().out == f"octavo {package.__version__}\n"


def test_without_a_command_the_help_is_shown_as_an_error(octavo: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo() == 2
    assert "commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generat"], "did you mean 'generate'?"),
        (["fly"], "known: generate, chat"),
        (["smollm2-135m"], "octavo run smollm2-135m"),
        (["model.gguf", "-p", "Hi"], "octavo run model.gguf"),
        (["--versoin"], "did you mean --version?"),
        (["generate", "m", "--max-num-seq", "4"], "did you mean --max-num-seqs?"),
        (["generate", "m", "--temprature=1", "p"], "did you mean --temperature?"),
        (["generate", "m", "--max_tokens", "4"], "did you mean --max-tokens?"),
        (["generate", "m", "-max-tokens", "4"], "did you mean --max-tokens?"),
        (["generate", "m", "p", "--max-tokens", "many"], "'many'"),
        (["generate", "m", "p", "--max-num-seqs", "0"], "greater than or equal to 1, not '0'"),
        (["generate", "m", "p", "--temperature", "-1"], "temperature must be at least 0, not -1"),
        (["generate", "m", "p", "--logit-bias", "[1]"], "must be a JSON object"),
        (
            ["generate", "m", "p", "--max-num-batched-tokens", "4", "--max-num-seqs", "8"],
            "must be at least max_num_seqs",
        ),
        (["generate", "m", "p", "--config", "/no/such.yaml"], "/no/such.yaml"),
        (["generate"], "no model given"),
        (["generate", "m"], "no prompt given"),
        (["generate", "m", "--input", "/no/such.txt"], "/no/such.txt"),
        (["generate", "m", "p", "--json", "/no/such/folder/x"], "cannot write --json"),
        (["generate", "no-such-model", "p"], "no-such-model"),
        (["chat"], "no model given"),
        (["chat", "m", "surplus"], "unexpected argument 'surplus'"),
        (["chat", "m", "--n", "2"], "unknown option --n"),
        (["chat", "m", "--top-p", "0"], "top_p must be in (0, 1], not 0"),
        (["pull"], "takes one NAME"),
        (["pull", "a", "b"], "takes one NAME"),
        (["info", "a", "b"], "unexpected argument 'b'"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    argv: list[str], said: str, octavo: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("octavo: error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


def checkpoint(folder: Path, model: Path, **changes: object) -> Path:
    """A copy of a model with a changed config.json; ``without`` names a file to leave out."""
    without = str(changes.pop("without", ""))
    shutil.copytree(model, folder, ignore=lambda *_: [without])
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["FooForCausalLM"]}, "'FooForCausalLM' is not supported; supported: "),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported'),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 3}, "lacks the tensors"),
        ({"without": "tokenizer.json"}, "has no tokenizer.json"),
        ({"without": "model.safetensors"}, "holds neither model.safetensors nor"),
        ({"without": "tokenizer.json", "architectures": ["FooForCausalLM"]}, "'FooForCausalLM' is not supported; supp"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_exit_code_2(
    octavo: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path, changes: dict, said: str
) -> None:
    folder = checkpoint(tmp_path / "model", tiny_model, **changes)
    assert octavo("generate", folder, "p") == 2
    assert said in capsys.readouterr().err


def test_a_server_of_an_unsupported_architecture_says_that_and_not_that_its_tokenizer_is_missing(
    tmp_path: Path, tiny_model: Path
) -> None:
    changes = {"without": "tokenizer.json", "architectures": ["FooForCausalLM"]}
    result = program("serve", str(checkpoint(tmp_path / "model", tiny_model, **changes)), "--port", "0")
    assert result.returncode == 2
    assert "'FooForCausalLM' is not supported; supported: " in result.stderr


def test_what_is_no_fault_of_the_call_or_the_checkpoint_is_exit_code_1(
    octavo: Run, capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    assert octavo("generate", tiny_model, "p", "--swap-space", "1e9") == 1
    assert "swap_space" in capsys.readouterr().err


def configure(monkeypatch: pytest.MonkeyPatch, where: str, model: Path, folder: Path) -> list[str]:
    """Names the model in a file or a variable; returns the flags that go with it."""
    file = folder / "octavo.yaml"
    file.write_text(f"model: {model}\nmax-num-seqs: 4\n")
    if where == "OCTAVO_MODEL":
        monkeypatch.setenv(where, str(model))
    elif where == "OCTAVO_CONFIG":
        monkeypatch.setenv(where, str(file))
    return ["--config", str(file)] if where == "--config" else []


@pytest.mark.parametrize("where", ["OCTAVO_MODEL", "OCTAVO_CONFIG", "--config"])
def test_a_model_that_is_configured_is_the_model_and_words_are_prompts(
    octavo: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_model: Path,
    where: str,
) -> None:
    flags = configure(monkeypatch, where, tiny_model, tmp_path)
    assert octavo("generate", "Hello", "--max-tokens", "1", "--json", "-", *flags) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["prompt"] == "Hello"
    assert octavo("info", "--json", "-", *flags) == 0
    assert json.loads(capsys.readouterr().out)["model"]["name"] == str(tiny_model)
    assert octavo("chat", *flags, "--max-tokens", "1", stdin="Hello\n") == 0
    capsys.readouterr()
    for command in (["chat"], ["serve"], ["bench", "offline"], ["info"]):
        assert octavo(*command, "other", *flags) == 2
        assert f"unexpected argument 'other': the model, '{tiny_model}', is configured" in capsys.readouterr().err
    assert octavo("generate", "Hello", "--model", "no-such-model", *flags) == 2
    assert "no-such-model" in capsys.readouterr().err


def test_a_wrong_environment_variable_is_refused(
    octavo: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_BLOCKSIZE", "8")
    assert octavo("generate", "m", "p") == 2
    assert "did you mean OCTAVO_BLOCK_SIZE?" in capsys.readouterr().err


def test_a_wrong_log_level_is_refused(
    octavo: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "loud")
    assert octavo("info") == 2
    assert "debug, info, warning, error, not 'loud'" in capsys.readouterr().err


def test_the_traceback_is_shown_when_debugging(
    octavo: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    assert octavo("generate") == 2
    captured = capsys.readouterr().err
    assert "Traceback" in captured
    assert captured.splitlines()[-1].startswith("octavo: error: no model given")


def test_a_reader_that_goes_away_ends_the_program_quietly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "--help"], env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=PATIENCE) != 0
    assert errors == b""


def test_info_reports_the_machine(octavo: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo("info", "--json", "-") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["octavo"] == package.__version__
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["cores"]["logical"] >= facts["cores"]["usable"] >= 1
    assert facts["memory_bytes"]["total"] > facts["memory_bytes"]["available"] > 0
    assert facts["devices"][0] == "cpu"
    assert facts["cpu"]
    assert facts["kernels"]
    built = facts["kernels_built_for"]
    assert facts["amx"] == "available" or "amx_bf16" not in facts["kernels"]
    assert (
        built == {}
        if find_spec("octavo._cpu") is None
        else "generic" in built["floats"] and "generic" in built["integers"]
    )
    assert "model" not in facts


def test_info_shows_the_limits_of_the_process(
    octavo: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "group_limits", lambda root: [MemoryLimit("/sys/fs/cgroup/a", 900 << 20, 400 << 20)])
    assert octavo("info", "--json", "-") == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"from": "/sys/fs/cgroup/a", "limit": 900 << 20, "used": 400 << 20} in facts["memory_limits"]
    assert facts["memory_bytes"]["available"] <= 500 << 20
    assert octavo("info") == 0
    assert "memory limit:          900 MiB, 400 MiB used, by /sys/fs/cgroup/a\n" in capsys.readouterr().out


def test_info_writes_lines_for_people_and_json_to_a_file(
    octavo: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    assert octavo("info") == 0
    lines = capsys.readouterr().out
    assert "GiB total" in lines
    assert str(tmp_path / "cache") in lines
    assert octavo("info", "--json", tmp_path / "facts.json") == 0
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "facts.json").read_text())["cache"] == str(tmp_path / "cache")


def test_info_checks_the_weights_of_a_model(
    octavo: Run, capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    assert octavo("info", tiny_model, "--check") == 0
    assert "no problems found" in capsys.readouterr().out
    assert octavo("info", "--check") == 2
    assert "--check needs a MODEL" in capsys.readouterr().err
    shutil.copytree(tiny_model, tmp_path / "broken")
    tensors = load_file(tiny_model / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "broken" / "model.safetensors")
    assert octavo("info", tmp_path / "broken", "--check", "--json", "-") == 2
    check = json.loads(capsys.readouterr().out)["check"]
    assert check["tensors"] == len(tensors)
    says = "1 of 32 values are infinite or not a number"
    assert check["problems"] == [{"tensor": "model.norm.weight", "problem": says}]


def test_info_describes_a_model(octavo: Run, capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    assert octavo("info", tiny_model, "--json", "-") == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert (model["layers"], model["heads"], model["kv_heads"], model["head_dim"]) == (2, 4, 2, 8)
    assert (model["vocab_size"], model["context_length"]) == (258, 256)
    assert model["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert model["weight_bytes"] >= 258 * 32 * 4
    assert model["sampling_defaults"]["temperature"] == 1.0 and model["quantization"] is None


def test_info_tells_what_a_model_is_sampled_with_and_how_it_is_quantized(
    octavo: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo("info", "smollm2-135m", "--json", "-") == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert (model["quantization"], model["tensor_types"]["Q4_1"]) == ("Q4_1", 210)
    assert (model["sampling_defaults"]["temperature"], model["sampling_defaults"]["top_p"]) == (0.2, 0.9)
    assert octavo("info", "smollm2-135m", "--json", "-", "--generation-config", "none") == 0
    assert json.loads(capsys.readouterr().out)["model"]["sampling_defaults"]["temperature"] == 1.0


def test_info_is_aligned_and_names_no_size_of_files_that_are_not_there(
    octavo: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(memory, "group_limits", lambda root: [MemoryLimit("/sys/fs/cgroup/a", 900 << 20, 400 << 20)])
    assert octavo("info", "gemma-3-270m-shape") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  kv cache:            3 layers keep all tokens, 3 KiB each" in lines
    labels = [re.match(r" *[^:]+: +", line) for line in lines if not line.endswith(":")]
    assert {label and label.end() for label in labels} == {23}
    assert not [line for line in lines if line.endswith(" 0 B")]


def test_pull_prints_the_folder_of_a_model_that_is_there(
    octavo: Run, capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    assert octavo("pull", tiny_model) == 0
    assert capsys.readouterr().out == f"{tiny_model}\n"


def test_pull_of_an_unknown_name_says_which_there_are(octavo: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo("pull", "smollm2-135n") == 2
    assert "smollm2-135m" in capsys.readouterr().err
