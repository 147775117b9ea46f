"""Features of images: what the tower makes of them beside the steps, kept on the host, and written into prompts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from octavo.core.image_input import ImageInput
from octavo.models.network import Network
from octavo.models.vision.tower import TowerInput
from octavo.runner.preparers import Preparer, PreparerContext
from octavo.runner.tower_runner import TowerRunner


@dataclass
class _Job:
    """An image whose pieces are computed one after the other."""

    key: str
    pieces: deque[TowerInput]
    features: list[np.ndarray] = field(default_factory=list)


class ImagePreparer(Preparer):
    """Owns the features of this worker's images: float32 [features, E] each. A stage without tower keeps nothing."""

    computes = True

    def __init__(self, context: PreparerContext) -> None:
        # Not the context, which has the network.
        self._device, self._kernels = context.device, context.layers.kernels
        self._options, self._config = context.options, context.config
        self._network: Network | None = context.network
        self._features: dict[str, np.ndarray] = {}
        self._jobs: deque[_Job] = deque()
        self._runner: TowerRunner | None = None
        #: Whether the first job's first piece is under way.
        self._has_begun = False

    def reserved_bytes(self, free: int) -> int:
        """See ``Preparer``: about what the tower takes for the largest piece, and the features that are kept."""
        assert self._network is not None
        tower, options = self._network.tower, self._options
        if tower is None:
            return 0
        rows = 4 * (options.max_model_len or self._config.max_position)
        if tower.max_rows is not None:
            rows = min(rows, tower.max_rows)
        width = tower.workspace.num_kv_heads * tower.workspace.head_dim
        # Stream, norm, queries, keys, values, what attention gives and a feed-forward network of four times the width.
        return 4 * rows * (tower.row_width + 14 * width) + options.image_cache_bytes

    def prepare(self, payload: bytes) -> list[TowerInput]:
        """See ``Preparer``; the payload is an ``ImageInput``."""
        assert self._network is not None
        tower = self._network.tower
        return [] if tower is None else tower.prepare(ImageInput.decode(payload))

    def keep(self, key: str, thing: list[TowerInput]) -> None:
        """See ``Preparer``: what was prepared is to be computed."""
        self._jobs.append(_Job(key, deque(thing)))

    def compute(self, seconds: float) -> str | None:
        """See ``Preparer``."""
        if not self._jobs:
            return None
        job = self._jobs[0]
        if job.pieces:
            runner = self._tower_runner()
            if not self._has_begun:
                runner.begin(job.pieces[0])
                self._has_begun = True
            features = runner.advance(seconds)
            if features is None:
                return None
            job.features.append(features)
            job.pieces.popleft()
            self._has_begun = False
        if job.pieces:
            return None
        self._jobs.popleft()
        self._features[job.key] = np.concatenate(job.features) if job.features else np.zeros((0, 0), np.float32)
        return job.key

    def drop(self, key: str) -> None:
        """See ``Preparer``."""
        if self._features.pop(key, None) is None:
            self._has_begun = self._has_begun and self._jobs[0].key != key
            self._jobs = deque(job for job in self._jobs if job.key != key)

    def find(self, key: str) -> np.ndarray:
        """Features of an image.

        Raises:
            RuntimeError: they were not computed, or dropped since.
        """
        if key not in self._features:
            raise RuntimeError(f"the features of {key} are not there")
        return self._features[key]

    def _tower_runner(self) -> TowerRunner:
        if self._runner is None:
            assert self._network is not None and self._network.tower is not None
            self._runner = TowerRunner(self._network.tower, self._device, self._kernels, self._options.block_size)
        return self._runner

    def release(self) -> None:
        """Forgets what was recorded, as weights may move; a piece that is under way begins anew."""
        self._runner, self._has_begun = None, False

    def detach(self) -> None:
        """See ``Preparer``."""
        self.release()
        self._network = None

    def attach(self, network: Network) -> None:
        """See ``Preparer``."""
        self._network = network
