"""Entry point of ``octavo``: imports and runs a command, turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from octavo import __version__
from octavo.cli.parsing import EXIT_FAILED, EXIT_USAGE, Parser
from octavo.core.errors import (
    ConfigError,
    ModelNotFoundError,
    OctavoError,
    TokenizerError,
    UnsupportedModelError,
    WeightError,
    as_memory_error,
    did_you_mean,
)

#: A shell's exit codes for a closed pipe and Ctrl-C.
EXIT_BROKEN_PIPE = 141
EXIT_INTERRUPTED = 130

#: Errors of the call, the configuration or the checkpoint: ``EXIT_USAGE``.
WRONG_INPUT = (ConfigError, ModelNotFoundError, UnsupportedModelError, WeightError, TokenizerError)

LOG_LEVELS = ("debug", "info", "warning", "error")

#: Command -> help.
COMMANDS = {
    "generate": "complete prompts, all of them as one batch",
    "chat": "talk with a model in the terminal",
    "serve": "serve a model over HTTP, under the routes of the OpenAI API",
    "transcribe": "write what is said in recordings, as text or subtitles",
    "embed": "write the vectors of texts, of a file of any size",
    "rerank": "sort texts by how well they fit a query",
    "batch": "answer a file of requests in the OpenAI API's batch format",
    "top": "watch the engine of a server in the terminal",
    "view": "show a recording of an engine in the browser",
    "pull": "download a model, unless it is cached, and print its folder",
    "list": "show the models in the cache",
    "rm": "remove models from the cache",
    "cache": "show what a KV store holds, or clear it",
    "simulate": "run a workload through the scheduler on a virtual clock, without a model",
    "bench": "measure throughput, latency, kernels, memory use, the scheduler",
    "completion": "print a script that completes commands and flags in bash, zsh or fish",
    "fit": "show which types, cache and context of a model fit this machine, and their speed",
    "info": "show facts about this machine, this installation and a model",
}

#: Commands of other programs -> Octavo's; ``run`` and ``help`` are in ``_dispatch``.
OTHER_COMMANDS = {"show": ["info"], "ls": ["list"], "remove": ["rm"], "run-batch": ["batch", "run"]}

#: Commands in the ``COMMANDS`` of a module with another name.
_MODULES = {"pull": "models", "list": "models", "rm": "models", "rerank": "embed"}

#: Commands in ``octavo.lab.commands``.
LAB_COMMANDS = ("simulate", "bench")

EXAMPLE = """\
examples:
  octavo generate smollm2-135m "The capital of France is" --temperature 0
  octavo chat smollm2-135m
  octavo serve smollm2-135m

'octavo COMMAND --help' shows the options of a command, 'octavo COMMAND --help all' the rare ones too.
'octavo run MODEL' is chat, 'octavo run MODEL PROMPT' is generate --chat; -m, -p, -n, -c and --temp are as elsewhere.
Exit codes: 0 all went well; 1 a request failed, or a download or the machine (too little memory, say); 2 the call, the
configuration or the checkpoint is wrong.
"""


def load_command(name: str) -> Any:
    """The module or ``Command`` with the functions ``make_parser()``, ``run(arguments)`` and perhaps ``main(argv)``."""
    module = _MODULES.get(name)
    if module is not None:
        return importlib.import_module(f"octavo.cli.{module}").COMMANDS[name]
    return importlib.import_module(f"{'octavo.lab.commands' if name in LAB_COMMANDS else 'octavo.cli'}.{name}")


def make_parser() -> Parser:
    """The top-level parser, without the commands' options."""
    lines = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog="octavo",
        usage="octavo COMMAND [options]",
        description=f"Serves large language models.\n\ncommands:\n{lines}",
        epilog=EXAMPLE,
    )
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 for success, 1 for a failure, 2 for a wrong call, configuration or checkpoint."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller: the next file would take its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # never fails to print a character
    try:
        _set_up_logging()
        try:
            code = _dispatch(argv)
        except SystemExit as e:  # raised by argparse after --help and after errors
            code = e.code if isinstance(e.code, int) else 0
        sys.stdout.flush()  # here, where a broken pipe can still be handled
    except BrokenPipeError:
        # The reader has ended (octavo ... | head): the interpreter must not flush into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OctavoError as e:
        if os.environ.get("OCTAVO_DEBUG", "") not in ("", "0"):
            traceback.print_exc()
        return _report(e)
    except Exception as e:
        memory_error = as_memory_error(e)  # such as a library that cannot be loaded within ulimit -v
        if memory_error is None:
            raise
        return _report(memory_error)
    return code


def _report(error: OctavoError) -> int:
    """One line on standard error; the exit code."""
    print(f"octavo: error: {' '.join(str(error).split())}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, WRONG_INPUT) else EXIT_FAILED


def _dispatch(argv: list[str]) -> int:
    if not argv:
        make_parser().print_help(sys.stderr)
        return EXIT_USAGE
    if argv[0] == "help":
        return _help(argv[1:])
    if argv[0] == "run":
        argv = _run_words(argv[1:])
    argv = [*OTHER_COMMANDS.get(argv[0], argv[:1]), *argv[1:]]
    name = argv[0]
    if name not in COMMANDS:
        parser = make_parser()
        if name.startswith("-"):
            parser.read(argv)  # exits for --help, --version and unknown flags
        from octavo.loader.builtin import BUILTIN

        hint = did_you_mean(name, COMMANDS)
        if name in BUILTIN or name.endswith(".gguf") or os.path.exists(name):
            hint = f"a command comes before the model, as in octavo run {name}"
        parser.error(f"unknown command {name!r}; {hint}")
    command = load_command(name)
    if hasattr(command, "main"):  # starts a process before it reads its flags
        return int(command.main(argv[1:]))
    return int(command.run(command.make_parser().read(argv[1:])))


def _help(words: list[str]) -> int:
    """``octavo help [COMMAND ...] [all]``."""
    if not words:
        make_parser().print_help()
        return 0
    every = words[1:] and words[-1] == "all"
    return _dispatch([*words[:-1], "--help", "all"] if every else [*words, "--help"])


def _run_words(argv: list[str]) -> list[str]:
    """Translates ``octavo run MODEL [PROMPT]`` of other programs: into chat, with a prompt into generate --chat."""
    from octavo.cli.chat import make_parser as chat_parser
    from octavo.cli.parsing import asks_for_help, own_flags

    parser = chat_parser()
    if asks_for_help(argv):
        return ["chat", *argv]
    arguments, rest = parser.parse_known_args(own_flags(argv, parser._option_string_actions))
    words = [word for word in rest if not word.startswith("-")]
    prompts = len(words) - (arguments.model is None)
    return ["generate", "--chat", *argv] if prompts > 0 or "-p" in argv or "--prompt" in argv else ["chat", *argv]


def _set_up_logging() -> None:
    """Logs to standard error, from level ``OCTAVO_LOG_LEVEL`` (default: info) on."""
    level = os.environ.get("OCTAVO_LOG_LEVEL") or "info"
    if level.lower() not in LOG_LEVELS:
        raise ConfigError(f"OCTAVO_LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}, not {level!r}")
    logger = logging.getLogger("octavo")
    logger.setLevel(level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("octavo: %(levelname)s: %(message)s"))
    logger.handlers = [handler]
    logging.getLogger("octavo.startup").setLevel(logging.NOTSET)
