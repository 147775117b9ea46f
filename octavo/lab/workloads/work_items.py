"""One request of a workload, as every benchmark and the simulator take it."""

from __future__ import annotations

import msgspec


class WorkItem(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that arrives at a time, with lengths instead of content.

    Content is made where it is needed, always the same: ``token_ids`` (``lab/workloads/tokens.py``). Every name of
    ``prefix`` and ``stream`` stands for an endless fixed sequence of token ids. The prompt is the first tokens of each
    prefix, one after another, and then tokens of ``stream``, from the first that no prefix has taken. So two prompts
    share what their prefixes share. The output continues ``stream``; the next turn of a conversation has it in its
    prompt.
    """

    #: Seconds after the start of the run.
    at: float
    #: Tokens of the whole prompt, prefixes included. 0: unknown, as the prompt is a text of a trace.
    input_len: int
    #: Tokens to generate.
    output_len: int
    #: (name, tokens): what the prompt begins with and others may too; together at most ``input_len`` tokens.
    prefix: tuple[tuple[str, int], ...] = ()
    #: Name of what follows the prefixes; of a conversation one for all turns.
    stream: str = ""
    #: Whose request it is, and the share of service due to this user relative to others.
    user: str | None = None
    weight: float = 1.0
    #: Seconds wanted from arrival to the first token, and for each token after it; None: no target.
    ttft_target: float | None = None
    tpot_target: float | None = None
    #: Lower goes first, under the policies that look at it.
    priority: int = 0
    #: The conversation that it is a turn of; its turns arrive in order. None: a request of its own.
    session: str | None = None
    #: Seconds to keep the blocks of its prompt for later requests, as a client who knows its next turn asks for
    #: (cache breakpoints at the ends of ``prefix`` and of the prompt); 0: it asks for nothing.
    cache_ttl: float = 0.0
    #: The prompt itself, of a trace that has it.
    prompt: str | tuple[int, ...] | None = None


def other_content(item: WorkItem, name: str) -> WorkItem:
    """The same request with another prompt of its own; what it shares with others, and a given prompt, stays."""
    stream = f"{name}/{item.stream}"
    prefix = tuple((stream if of == item.stream else of, length) for of, length in item.prefix)
    return msgspec.structs.replace(item, stream=stream, prefix=prefix)
