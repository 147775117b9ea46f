"""``SequenceFailure``: why one sequence ended with an error, as workers and the scheduler report it."""

from __future__ import annotations

import msgspec

#: Kinds of ``SequenceFailure`` that are a request's own fault, or are told to its client: the request's adapter could
#: not be loaded; its sequences have outgrown the KV cache; its grammar exceeds the parser's limits, with the model's
#: vocabulary or in an output; every token is masked; a vector or score is NaN or infinite.
ADAPTER, KV_CACHE, GRAMMAR, NO_TOKEN_LEFT, NOT_FINITE = "adapter", "kv_cache", "grammar", "no_token_left", "not_finite"

#: The step that computed the request failed again and again, at last when nothing else was computed: a fault of the
#: engine, or of code that the request brings.
STEP = "step"


class SequenceFailure(msgspec.Struct, array_like=True, frozen=True):
    """Why a sequence, a request or a preparation for it ended with an error."""

    text: str
    #: "": the engine is at fault, in no way that others need to know.
    kind: str = ""
