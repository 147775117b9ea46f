"""The place of a worker among those that share one network."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.config import ParallelOptions
from octavo.core.errors import ConfigError


@dataclass(frozen=True)
class ParallelLayout:
    """One worker's place: workers are numbered by stage, and within a stage by tensor-parallel rank."""

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    #: Layers of each stage; None: as even as possible.
    partition: tuple[int, ...] | None = None

    @classmethod
    def of(cls, options: ParallelOptions, rank: int) -> ParallelLayout:
        """The place of worker ``rank`` of an engine with these options."""
        partition = options.pipeline_layer_partition
        return cls(
            rank,
            options.tensor_parallel_size,
            options.pipeline_parallel_size,
            None if partition is None else tuple(partition),
        )

    @property
    def world_size(self) -> int:
        """Workers in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tp_rank(self) -> int:
        """Its number among the workers of its stage."""
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """Its pipeline stage."""
        return self.rank // self.tensor_parallel_size

    @property
    def is_last_stage(self) -> bool:
        """Whether its stage samples."""
        return self.stage == self.pipeline_parallel_size - 1

    @property
    def output_rank(self) -> int:
        """The worker whose results count: the first of the last stage."""
        return self.world_size - self.tensor_parallel_size

    def layers(self, num_layers: int) -> range | None:
        """The layers of its stage; None: all of the network's ``num_layers``.

        Raises:
            ConfigError: the layers cannot be divided so.
        """
        stages = self.pipeline_parallel_size
        if stages == 1:
            return None
        if self.partition is not None:
            if sum(self.partition) != num_layers:
                raise ConfigError(
                    f"pipeline_layer_partition {list(self.partition)} has {sum(self.partition)} layers, but the "
                    f"network has {num_layers}"
                )
            first = sum(self.partition[: self.stage])
            return range(first, first + self.partition[self.stage])
        if num_layers < stages:
            raise ConfigError(f"pipeline_parallel_size ({stages}) is more than the network's {num_layers} layers")
        return range(self.stage * num_layers // stages, (self.stage + 1) * num_layers // stages)
