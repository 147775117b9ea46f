"""Prompts whose blocks are all in the KV stores, so that another engine can continue their requests at little cost.

Disaggregated prefill (Zhong et al. 2024, DistServe; Patel et al. 2024, Splitwise) by way of a store: an engine computes
a prompt and writes its blocks; the front end, told by ``EngineCoreOutputs.stored``, moves the request to an engine that
decodes, which fetches them. Until then the first engine decodes, so nothing waits for a write.
"""

from __future__ import annotations

from octavo.core.request import SequenceStatus
from octavo.memory.prefix_cache import SequencePrefixes
from octavo.memory.stored import StoredBlocks
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.step import Step


class StoredPrompts:
    """Owns the blocks of computed prompts that are not written yet."""

    def __init__(self, stored: StoredBlocks, prefixes: SequencePrefixes, num_kv_groups: int) -> None:
        self._stored, self._prefixes, self._kv_groups = stored, prefixes, range(num_kv_groups)
        #: Groups, and the blocks of their prompts that were under way at the last look.
        self._open: list[tuple[SequenceGroup, list[tuple[int, bytes]]]] = []

    def observe_filled(self, step: Step) -> None:
        """Notes prompts that a step has completed, after their blocks were registered."""
        for seq, num_computed in step.filled:
            group = seq.group
            if (
                not group.prompt_noted
                and seq.status is SequenceStatus.RUNNING
                and num_computed >= len(group.request.prompt_token_ids)
            ):
                group.prompt_noted = True
                digests = self._prefixes.registered(seq.seq_id)
                self._open.append((group, [(number, digest) for number in self._kv_groups for digest in digests]))

    def take(self) -> list[int]:
        """The groups whose prompts' blocks were written, or lost, since the last call."""
        written, still_open = [], []
        for group, blocks in self._open:
            while blocks and not self._stored.is_under_way(*blocks[-1]):
                blocks.pop()
            if group.status.finished:
                continue
            if blocks:
                still_open.append((group, blocks))
            else:
                written.append(group.group_id)
        self._open = still_open
        return written
