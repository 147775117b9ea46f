"""Sleep mode: the memory of weights is given back, for a while."""

from __future__ import annotations

from octavo.models.sizes import weight_bytes
from octavo.runner.device import WeightsAway
from octavo.runner.loaded_model import LoadedModel


class WeightSleep:
    """Frees the memory of a model's weights, and brings them back."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        #: Weights of a GPU that are in host memory.
        self._asleep: WeightsAway | None = None

    @property
    def are_away(self) -> bool:
        """Whether ``wake_up`` has something to restore."""
        return self._asleep is not None or not self._loaded.has_weights

    def sleep(self, level: int) -> int:
        """Bytes that were freed. Level 2 may follow level 1.

        Level 1 moves the weights of a GPU to host memory; on a CPU they are there already, and stay as they are packed.
        Level 2 drops the weights.
        """
        loaded = self._loaded
        if not loaded.has_weights:
            return 0
        if level == 2:
            freed = 0 if self._asleep else sum(map(weight_bytes, loaded.networks))
            self._asleep = None
            loaded.drop_weights()
            return freed
        if self._asleep is not None:
            return 0
        self._asleep = loaded.device.put_to_sleep(loaded.networks)
        return 0 if self._asleep is None else self._asleep.bytes_freed

    def wake_up(self, num_positions: int) -> None:
        """Restores the weights, read again for sequences of up to so many tokens if they were dropped.

        Raises:
            WeightError: the checkpoint cannot be read any more.
        """
        if not self._loaded.has_weights:
            self._loaded.read_weights(num_positions)
        if self._asleep is not None:
            self._asleep.wake_up()
            self._asleep = None
