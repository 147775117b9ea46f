"""What the workers of one machine share: made by their executor, inherited by their processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LocalConnections:
    """Memory and pipes of one worker, as descriptors of this process."""

    #: Of the tensor-parallel group, if its ranks exchange through memory.
    group: int | None = None
    #: (memory, end of the pipe) of the link from the stage before, and of the one to the stage after.
    incoming: tuple[int, int] | None = None
    outgoing: tuple[int, int] | None = None

    @property
    def descriptors(self) -> list[int]:
        """All of them."""
        links = [end for link in (self.incoming, self.outgoing) if link for end in link]
        return links if self.group is None else [self.group, *links]
