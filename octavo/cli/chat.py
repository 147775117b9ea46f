"""``octavo chat``: a conversation in the terminal, with streamed answers."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import TYPE_CHECKING

from octavo.cli.chat_commands import LEAVE_OUT, completions, help_text, run_command, settings_text
from octavo.cli.chat_conversation import Conversation
from octavo.cli.chat_display import MarkdownDisplay, choose_display
from octavo.cli.chat_history import HistoryFile, default_path
from octavo.cli.chat_input import keys_unseen, typed_messages
from octavo.cli.engine_flags import (
    add_engine_flags,
    add_lora_flag,
    add_verbose_flag,
    apply_verbosity,
    read_engine_config,
    read_lora,
    take_model,
)
from octavo.cli.parsing import EXIT_FAILED, Arguments, Parser, errors_of_the_call
from octavo.cli.sampling_flags import add_sampling_flags, read_sampling_params
from octavo.cli.terminal_text import is_smart_terminal, notice
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.sampling_params import DefaultMaxTokens, SamplingParams
from octavo.loader.builtin import BUILTIN

if TYPE_CHECKING:
    from octavo.engine.model_files import ModelFiles

#: Where the model has no defaults of its own: less random than the full distribution of a small model, and an end to
#: answers that would repeat themselves up to the end of the context, with room for some reasoning.
DEFAULTS = {"max_tokens": DefaultMaxTokens(2048), "temperature": 0.7, "top_p": 0.95}

EXAMPLE = """\
examples:
  octavo chat smollm2-135m
  octavo chat smollm2-135m --system "Answer in one sentence." --temperature 0
  echo "What is the capital of France?" | octavo chat smollm2-135m

In the conversation:
  """ + help_text().replace("\n", "\n  ").rstrip(" ")


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo chat",
        usage="octavo chat [options] [MODEL]",
        description="A conversation in the terminal; where standard input is piped, each line is a question.\n"
        "Where the context is full, the oldest turns are dropped, which is said.",
        epilog=EXAMPLE,
    )
    add_verbose_flag(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message: how the model should answer")
    parser.add_argument(
        "--plain", dest="as_written", action="store_true", help="show answers as the model writes them, not as Markdown"
    )
    parser.add_argument("--stats", action="store_true", help="show tokens/s and the time to the first token of answers")
    parser.add_argument("--no-history", action="store_true", help="do not remember what is typed for the arrow keys")
    add_lora_flag(parser)
    add_engine_flags(parser, renamed={"seed": "--engine-seed"})
    add_sampling_flags(parser, defaults=DEFAULTS, leave_out=LEAVE_OUT)
    return parser


def run(arguments: Arguments) -> int:
    """Runs the conversation; returns 1 if a question could not be answered."""
    apply_verbosity(arguments)
    lora = read_lora(arguments)
    config = read_engine_config(arguments, take_model(arguments))
    with errors_of_the_call():
        params = read_sampling_params(arguments, DEFAULTS)
    _refuse_base_model(config)
    from octavo.engine.model_files import find_files

    files = find_files(config)
    _check(files, params)
    from octavo.engine.llm_engine import LLMEngine

    display = choose_display(plain=arguments.as_written)
    if sys.stdin.isatty() and is_smart_terminal():
        _import_beside("octavo.cli.chat_keyboard")  # while weights are read
    engine = LLMEngine(files)
    if lora is not None:
        engine.add_lora(lora)
    params = read_sampling_params(arguments, {**DEFAULTS, **engine.inputs.default_sampling})
    conversation = Conversation(
        engine, params, arguments.system, lora, model=config.model, display=display, show_times=arguments.stats
    )
    talk(conversation, None if arguments.no_history else HistoryFile(default_path()))
    return EXIT_FAILED if conversation.failures else 0


def _import_beside(module: str, after: float = 0.0) -> None:
    """Imports a module on a thread, after so many seconds: it takes some tenths of a second."""
    timer = threading.Timer(after, importlib.import_module, [module])
    timer.daemon = True
    timer.start()


def talk(conversation: Conversation, history: HistoryFile | None) -> None:
    """Answers what is typed or piped, up to its end or ``/exit``."""
    if sys.stdin.isatty():
        notice(f"{conversation.model}: {settings_text(conversation.params)}")
        notice("type a question; /help shows commands")
        if isinstance(conversation.display, MarkdownDisplay):
            _import_beside("octavo.cli.chat_markdown", after=0.3)  # while the first question is typed
    for typed in typed_messages(history, completions):
        with keys_unseen():
            if typed.is_command:
                run_command(conversation, typed.text)
            else:
                conversation.ask(typed.text)
        if conversation.over:
            break


def _refuse_base_model(config: EngineConfig) -> None:
    """Refuses a built-in model that answers no questions, before it is fetched."""
    model = BUILTIN.get(config.model)
    if model is None:
        return
    chats = ", ".join(name for name, other in BUILTIN.items() if other.chats)
    if model.embeds:
        raise ConfigError(f"{model.name} makes vectors ('octavo embed {model.name} ...'); take a chat model: {chats}")
    if model.transcribes:
        raise ConfigError(
            f"{model.name} makes texts of recordings ('octavo transcribe FILE --model {model.name}'); take a chat "
            f"model: {chats}"
        )
    if model.is_base and config.chat_template is None:
        raise ConfigError(
            f"{model.name} is a base model: it continues texts ('octavo generate {model.name} ...') and answers no "
            f"questions; take a chat model, such as {chats}, or give a template of your own (--chat-template FILE)"
        )


def _check(files: ModelFiles, params: SamplingParams) -> None:
    """Refuses, before the model is loaded, one that has no chat template, and a form that no answer can have.

    Raises:
        ConfigError: see above.
    """
    from octavo.engine.chat_template import choose_template
    from octavo.engine.input_processor import InputProcessor

    try:
        choose_template(files.tokenizer.chat_templates, None, has_tools=False)
        if params.structured_outputs is not None:
            InputProcessor(files).grammars.compile(params.structured_outputs)
    except InvalidRequestError as e:
        raise ConfigError(f"{files.options.model}: {e}") from None
