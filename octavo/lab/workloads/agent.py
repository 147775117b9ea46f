"""The trace of agents: conversations of many turns that call tools, with one system prompt and tool definitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from octavo.lab.workloads.lengths import Constant, Lengths, Lognormal
from octavo.lab.workloads.sharing import Conversations, SystemPrompts
from octavo.lab.workloads.work_items import WorkItem
from octavo.lab.workloads.workload import Workload

_RESULTS, _OUTPUTS = Lognormal(20, 1.0, 400), Lognormal(10, 0.5, 40)


@dataclass(frozen=True)
class AgentTrace:
    """Requests of agents that work at once, in order of arrival; made anew, and the same, by each iteration.

    An agent sends all that was said, and something new: at first its task, then the result of its last tool call. Most
    results are short, and some are whole files. The defaults are a fifth of a large agent's lengths, for a small model.
    """

    agents: int = 3
    turns: int = 43
    #: Tokens of the system prompt with the definitions of the tools, which all agents share.
    system_len: int = 1000
    #: Tokens of an agent's own instructions and files, which come before its first turn.
    task_len: int = 3000
    results: Lengths = _RESULTS
    #: Tool calls and answers.
    outputs: Lengths = _OUTPUTS
    #: Mean seconds from turn to turn, the answer's time included.
    pause: float = 60.0
    #: Seconds for which agents ask to keep the prefix of each prompt; 0: they ask for nothing.
    cache_ttl: float = 0.0
    seed: int = 0

    def __iter__(self) -> Iterator[WorkItem]:
        load = Workload(
            requests=self.agents * self.turns,
            inputs=self.results,
            outputs=self.outputs,
            system_prompts=SystemPrompts(1, self.system_len),
            conversations=Conversations(Constant(self.turns), self.pause, max_context=1 << 20),
            cache_ttl=self.cache_ttl,
            seed=self.seed,
            name="agent",
        )
        for item in load:
            system, *before = item.prefix
            prefix = (system, (f"{item.session}/task", self.task_len), *before)
            yield msgspec.structs.replace(item, prefix=prefix, input_len=item.input_len + self.task_len)

    def __len__(self) -> int:
        return self.agents * self.turns

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold all conversations to their ends."""
        longest: dict[str | None, int] = {}
        for item in self:
            longest[item.session] = max(longest.get(item.session, 0), item.input_len + item.output_len)
        shared = self.system_len // block_size
        return shared + sum(-(-length // block_size) - shared for length in longest.values())

    def max_model_len(self) -> int:
        """The longest prompt with its answer."""
        return max(item.input_len + item.output_len for item in self)
