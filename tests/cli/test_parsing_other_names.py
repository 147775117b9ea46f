"""Names of other engines: flags, commands, and what is said where nothing here is meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli import chat, generate, serve
from octavo.cli.parsing import own_flags
from octavo.core.foreign import ABSENT_FLAGS, OTHER_FLAGS
from octavo.lab.commands import bench
from tests.cli.helpers import Capture, Run


def test_flags_of_llama_cpp_are_those_of_generate() -> None:
    sampling = ["-n", "16", "--temp", "0.5", "--repeat-penalty", "1.1", "-s", "7"]
    given = generate.make_parser().read(["-m", "m.gguf", "-p", "Hi", *sampling, "-c", "512", "-t", "2", "-np", "4"])
    assert (given.model, given.prompt) == ("m.gguf", ["Hi"])
    assert given.group("sampling") == {"max_tokens": 16, "temperature": 0.5, "repetition_penalty": 1.1, "seed": 7}
    assert given.group("engine") == {"max_model_len": 512, "num_threads": 2, "max_num_seqs": 4}


def test_other_names_mean_what_the_command_has() -> None:
    served = serve.make_parser().read(["-hf", "owner/name", "--alias=x", "-c=64"])
    assert (served.model, served.group("engine")) == ("owner/name", {"max_model_len": 64})
    assert chat.make_parser().read(["-m", "m", "-sys", "Be brief."]).system == "Be brief."
    timed = bench.make_parser().read(["offline", "m", "-p", "512", "-n", "32"])
    assert (timed.input_len, timed.output_len) == ("512", "32")


def test_values_without_a_limit_are_none() -> None:
    given = generate.make_parser().read(["m", "x", "-n", "-1", "-c", "0", "-s=-1"])
    assert given.group("sampling") == {"max_tokens": None, "seed": None}
    assert given.group("engine") == {"max_model_len": None}


def test_flags_of_a_projector_are_those_of_llama_cpp() -> None:
    def mmproj(*flags: str) -> object:
        return serve.make_parser().read(["m.gguf", *flags]).group("engine")

    for flag in ("-mm", "--mmproj", "-mmu", "--mmproj-url"):
        assert mmproj(flag, "mmproj-F16.gguf") == {"mmproj": "mmproj-F16.gguf"}
    assert mmproj("--no-mmproj", "--mmproj-auto") == {"mmproj": "auto"}
    assert mmproj("--no-mmproj-auto") == {"mmproj": "none"}


def test_words_of_the_command_itself_stay() -> None:
    known = {"-i", "--model", "--max-tokens"}
    words = ["-i", "a", "-max-tokens", "--", "-m", "-n"]
    assert own_flags(words, known) == words
    assert own_flags(["-p", "x"], known) == ["-p", "x"], "no flag of the command has this meaning"


def test_every_other_name_is_of_a_flag_that_some_command_has() -> None:
    parsers = [module.make_parser() for module in (generate, chat, serve)]
    flags = {flag for parser in parsers for flag in parser._option_string_actions}
    assert {ours[0].partition("=")[0] for ours in OTHER_FLAGS.values()} <= flags
    assert not flags & (OTHER_FLAGS.keys() | ABSENT_FLAGS.keys())


@pytest.mark.parametrize("flag", ["-ngl", "-fa", "-cnv"])
def test_a_flag_without_a_counterpart_says_what_to_do(flag: str, octavo: Run, capsys: Capture) -> None:
    assert octavo("generate", "m", "p", flag, "1") == 2
    assert ABSENT_FLAGS[flag] in capsys.readouterr().err


def test_help_is_a_command_too(octavo: Run, capsys: Capture) -> None:
    def shown(*argv: str) -> str:
        assert octavo(*argv) == 0
        return capsys.readouterr().out

    assert shown("help") == shown("--help")
    assert shown("help", "serve") == shown("serve", "--help")
    assert shown("help", "bench", "serve") == shown("bench", "serve", "--help")
    assert shown("help", "serve", "all") == shown("serve", "--help=all")
    for argv in (["help", "nosuch"], ["nosuch", "--help"]):
        assert octavo(*argv) == 2
        assert "unknown command 'nosuch'" in capsys.readouterr().err


def test_run_is_a_conversation_or_the_answer_to_a_prompt(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    flags = ("-n", "3", "--temp", "0", "--num-gpu-blocks-override", "64", "--num-threads", "1")
    assert octavo("run", tiny_model, "hello", *flags) == 0
    answer = capsys.readouterr()
    assert "1 request" in answer.err
    assert octavo("generate", tiny_model, "--chat", "hello", *flags) == 0
    assert capsys.readouterr().out == answer.out
    assert octavo("run", tiny_model, *flags) == 0, "standard input is empty: a conversation of no question"
    assert octavo("run") == 2
    assert "no model given" in capsys.readouterr().err


def test_commands_of_other_programs(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    assert octavo("show", tiny_model, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["model"]["layers"] == 2
    assert octavo("ls") == 0


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "info"])
def test_a_prompt_in_the_place_of_the_model_is_told(command: str, octavo: Run, capsys: Capture) -> None:
    assert octavo(command, "Hi there") == 2
    assert f"octavo {command} smollm2-135m 'Hi there'" in capsys.readouterr().err


def test_help_shows_the_options_that_most_people_look_for_and_all_the_rest(octavo: Run, capsys: Capture) -> None:
    def flags(*argv: str) -> set[str]:
        assert octavo(*argv) == 0
        return {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  -")}

    for command in ("generate", "chat", "serve", "info", "embed", "batch", "bench", "simulate"):
        short, whole = flags(command, "--help"), flags(command, "--help", "all")
        assert short < whole == flags(command, "--help=all") == flags(command, "-h", "all")
        assert len(short) <= 60 < len(whole)
    assert len(flags("serve", "--help")) == 48
    assert octavo("serve", "--help") == 0
    rest = len(flags("serve", "--help=all")) - 48
    assert octavo("serve", "--help") == 0
    assert f"{rest} more options: octavo serve --help all" in capsys.readouterr().out
