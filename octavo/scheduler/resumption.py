"""Groups that go on as after a preemption by recompute: at another engine core, or when they were set aside."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import msgspec

from octavo.core.progress import CompletionProgress, DraftStats, Progress
from octavo.core.request import EngineCoreRequest
from octavo.scheduler.groups import Sequence, SequenceGroup


def suspend(group: SequenceGroup) -> EngineCoreRequest | None:
    """The request of an unfinished group as ``resume`` goes on with it; None if what is known of it is torn.

    Tokens of steps in flight are lost, and will be sampled again. All tokens of its sequences must have been reported.
    """
    seqs = [seq for seq in group.seqs if not seq.status.finished]
    if group.status.finished or not seqs:
        return None
    request, prompt = group.request, len(group.request.prompt_token_ids)
    if group.totals.first_scheduled_time is None:
        return request  # nothing of it was computed
    drafts = DraftStats(group.group_id, group.num_draft_tokens, group.num_accepted_tokens)
    progress = Progress([], None, group.totals, drafts if group.num_draft_tokens else None)
    generated = [seq.token_ids[prompt:] for seq in seqs]
    if group.beam is not None:
        progress.beams = group.beam.progress(generated)
        if progress.beams is not None and len(progress.beams.cumulative_logprobs) != len(generated):
            return None  # the search has gone on, and its sequences have not
    else:
        begun = [(seq, tokens) for seq, tokens in zip(seqs, generated, strict=True) if tokens]
        progress.completions = [CompletionProgress(seq.index, tokens) for seq, tokens in begun]
    return msgspec.structs.replace(request, progress=progress)


def resume(group: SequenceGroup, progress: Progress, seq_ids: Iterator[int], block_size: int) -> None:
    """Gives a new group the sequences and totals that it had when its engine core was lost, or it was taken from it.

    What is not known to the front end, such as which blocks were shared, is found out from the tokens; tokens that the
    core had sampled and not reported are sampled again, and are the same.
    """
    if progress.totals is not None:
        known = len(group.request.prompt_token_ids) + sum(len(c.token_ids) for c in progress.completions)
        group.totals = msgspec.structs.replace(
            progress.totals,
            group_id=group.group_id,
            num_recomputes=progress.totals.num_recomputes + 1,
            num_recomputed_tokens=progress.totals.num_recomputed_tokens + known,
        )
    if (drafts := progress.drafts) is not None:
        group.num_draft_tokens, group.num_accepted_tokens = drafts.num_draft_tokens, drafts.num_accepted_tokens
    generated = [(c.index, c.token_ids) for c in progress.completions]
    if progress.beams is not None and group.beam is not None:
        group.beam.resume(progress.beams)
        generated = [(0, tokens) for tokens in progress.beams.token_ids]
    if not generated:
        return
    num_seqs = group.num_seqs if group.beam is not None else len(generated)
    prompt, first_id = group.request.prompt_token_ids, group.seqs[0].seq_id
    group.seqs = []
    for index, token_ids in generated:
        seq_id = next(seq_ids) if group.seqs else first_id
        group.seqs.append(Sequence(seq_id, group, index, prompt + token_ids))
    group.num_pending_forks = num_seqs - len(generated)
    _share_prefixes(group.seqs, len(prompt), block_size)


def _share_prefixes(seqs: list[Sequence], prompt: int, block_size: int) -> None:
    """Has each sequence share its first full blocks with the earlier sequence whose tokens agree with most of its."""
    for position, seq in enumerate(seqs[1:], 1):
        common = [
            (_num_common(other.token_ids, seq.token_ids, prompt) // block_size, other) for other in seqs[:position]
        ]
        count, earlier = max(common, key=lambda pair: pair[0])
        seq.shared_prefix = (earlier, count) if count else None


def _num_common(first: SequenceOf[int], second: SequenceOf[int], start: int) -> int:
    """First tokens that both have, of those that can be computed: all but the last. The first ``start`` agree."""
    end = min(len(first), len(second)) - 1
    return next((i for i in range(start, end) if first[i] != second[i]), end)
