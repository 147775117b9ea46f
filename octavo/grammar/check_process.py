"""The process that compiles new grammars on trial: what a client sends may crash, fill the memory or never end here.

Started by ``compiler.Checker`` as ``python -m octavo.grammar.check_process``. It reads requests from its standard input
and writes answers to its standard output, each with its length before it, and ends with its input.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import IO

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.structured_outputs import Grammar, StructuredOutputsParams

#: The engine's steps go first.
NICENESS = 10
#: Memory that a grammar may take, in bytes.
MAX_MEMORY = 1 << 30
#: Of a busy machine: so many times the seconds of processor time may pass.
_PATIENCE = 4
#: Less than threads of workers have, in which the same grammar is compiled again.
STACK_BYTES = 1 << 20
_LENGTH_BYTES = 4


class CheckRequest(msgspec.Struct):
    """A form to compile."""

    params: StructuredOutputsParams
    #: Texts that the tokenizer has as a token of its own.
    special_tokens: list[str]
    #: Grammars may name tokens by their ids.
    vocab_size: int
    #: Seconds of processor time after which the process is killed.
    seconds: float


class CheckAnswer(msgspec.Struct):
    """Its grammar, or what is wrong with it."""

    grammar: Grammar | None = None
    error: str = ""


def write_message(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Writes a message with its length."""
    content = msgspec.msgpack.encode(message)
    stream.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes:
    """The content of the next message.

    Raises:
        EOFError: there is none.
    """
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    content = stream.read(length)
    if not content:
        raise EOFError
    return content


def main() -> None:
    """Answers requests until the input ends."""
    from octavo.grammar.compile import make_grammar

    os.nice(NICENESS)
    _limit_memory()
    decode = msgspec.msgpack.Decoder(CheckRequest).decode
    while True:
        try:
            request = decode(read_message(sys.stdin.buffer))
        except EOFError:
            return
        _limit_time(request.seconds)
        try:
            answer = CheckAnswer(make_grammar(request.params, frozenset(request.special_tokens), request.vocab_size))
        except InvalidRequestError as e:
            answer = CheckAnswer(error=str(e))
        except (MemoryError, RecursionError) as e:
            answer = CheckAnswer(error=f"structured_outputs.{request.params.form} is too large: {e or 'out of memory'}")
        _limit_time(0)
        write_message(sys.stdout.buffer, answer)


def _limit_time(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * _PATIENCE)


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    for limit, value in ((resource.RLIMIT_AS, taken + MAX_MEMORY), (resource.RLIMIT_STACK, STACK_BYTES)):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


if __name__ == "__main__":
    main()
