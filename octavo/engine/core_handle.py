"""``CoreHandle``: one engine core, in this process (``LocalCore``) or in another (``CoreClient``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from octavo.core.errors import OctavoError
from octavo.engine.messages import StepDone, ToCore

T = TypeVar("T")


class CoreHandle(ABC):
    """One engine core, as the front end uses it. A core that has failed is replaced, see ``Replicas``."""

    #: Why the core has ended, if it has.
    error: OctavoError | None = None
    #: ``checkpoint_digest`` of the model that it has loaded.
    digest: str = ""

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process that the core runs in."""

    @abstractmethod
    def connect(self, on_step: Callable[[StepDone], Awaitable[None]], on_death: Callable[[OctavoError], None]) -> None:
        """Sets what is called with each step of a core in another process, and once when that core dies."""

    @abstractmethod
    def send(self, message: ToCore) -> None:
        """Sends a message without waiting; no effect if the core has ended.

        Raises:
            InvalidRequestError: the message is too long or cannot be encoded.
        """

    @abstractmethod
    async def call(self, method: str, kind: type[T], *args: Any) -> T:
        """Calls an operation of the core (``EngineCore.call``); its answer is a ``kind``.

        Raises:
            EngineDeadError: the core ended before it answered.
            OctavoError: the method failed.
        """

    @abstractmethod
    async def kill(self) -> None:
        """Ends the core at once, and waits for its end."""

    @abstractmethod
    def last_groups(self) -> set[int]:
        """The groups of the core's last steps, for ``Blame``."""


C = TypeVar("C", bound=CoreHandle)
