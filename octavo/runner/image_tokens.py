"""The tokens of a step that stand for features of images: their embeddings, and what they see."""

from __future__ import annotations

import numpy as np

from octavo.core.plan import NewSequence
from octavo.core.request import Feature
from octavo.models.network import Network
from octavo.runner.image_preparer import ImagePreparer
from octavo.runner.step_inputs import StepInputs


class ImageTokens:
    """Knows which tokens of the worker's sequences stand for features.

    In a step their embeddings are rows of the table of virtual tokens, which are written for it, and their ids are
    those of these rows.
    """

    def __init__(self, images: ImagePreparer, vocab_size: int, first_row: int) -> None:
        """``first_row``: of as many virtual tokens as a step may have tokens."""
        self._images, self._vocab_size, self._first_row = images, vocab_size, first_row
        #: By sequence id; in the order of their offsets.
        self._features: dict[int, list[Feature]] = {}

    def add(self, sequence: NewSequence) -> None:
        """A new sequence."""
        if sequence.features:
            self._features[sequence.seq_id] = sequence.features

    def forget(self, seq_id: int) -> None:
        """A sequence has left the worker."""
        self._features.pop(seq_id, None)

    def write(self, inputs: StepInputs, network: Network) -> None:
        """Writes the features of a step's tokens, and says where they are."""
        if not self._features:
            return
        ids, sees_until = inputs.arrays["token_ids"], inputs.arrays["sees_until"]
        offsets, parts, count = inputs.arrays["query_start_loc"], [], 0
        for i, seq_id in enumerate(inputs.seq_ids):
            begin, end = int(inputs.starts[i]), int(inputs.ends[i])
            for feature in self._features.get(seq_id, ()):
                first, last = max(begin, feature.offset), min(end, feature.offset + feature.length)
                if first >= last:
                    continue
                span = slice(feature.first + first - feature.offset, feature.first + last - feature.offset)
                parts.append(self._images.find(feature.image)[span])
                rows = slice(int(offsets[i]) + first - begin, int(offsets[i]) + last - begin)
                ids[rows] = self._vocab_size + self._first_row + count + np.arange(last - first)
                count += last - first
                if feature.is_whole:
                    sees_until[rows] = feature.offset + feature.length - 1
                    inputs.has_spans = True
        if parts:
            network.set_virtual_tokens(self._first_row, np.concatenate(parts))
