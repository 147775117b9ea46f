"""Requests that leave a replica on purpose: it is drained, or its engine core is started again."""

from __future__ import annotations

import asyncio
import time

from octavo.core.errors import ConfigError, EngineDeadError, EngineStateError
from octavo.engine.replica import Replica
from octavo.engine.replicas import Replicas

#: Seconds between two looks at what is left on a replica.
_POLL = 0.02


class Migration:
    """Moves the requests of replicas without breaking a stream. For one event loop."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._restarting = False

    def _replica(self, number: int) -> Replica:
        if not 0 <= number < len(self._replicas.all):
            raise ConfigError(f"there is no replica {number}; there are 0 to {len(self._replicas.all) - 1}")
        return self._replicas.all[number]

    async def drain(self, number: int) -> int:
        """Has a replica take no more requests, and others go on with those that it has: how many.

        Those that only its core can go on with end there: the model was changed, and the others have its new files.

        Raises:
            ConfigError: there is no such replica.
            EngineStateError: no other one takes requests.
        """
        replica = self._replica(number)
        if not any(other.status == "ready" for other in self._replicas.all if other is not replica):
            raise EngineStateError(f"no replica takes requests except {number}, so it cannot be drained")
        replica.drained = True
        if replica.status == "ready":
            replica.status = "drained"
        return await self._move(replica)

    def undrain(self, number: int) -> None:
        """Has a replica take requests again; nothing happens if it does.

        Raises:
            ConfigError: there is no such replica.
        """
        replica = self._replica(number)
        replica.drained = False
        if replica.status == "drained" and not replica.is_restarting:
            self._replicas.open_replica(replica)

    async def _move(self, replica: Replica, next_digest: str | None = None) -> int:
        try:
            return await self._replicas.requests.move(replica.number, next_digest)
        except EngineDeadError:  # its requests have gone to others, as whenever a core dies
            return 0

    async def restart(self) -> None:
        """Starts the core of each replica again, one after the other, with the files that the model has now.

        The requests of a replica go on at the others; if there is no other, they and new ones wait for its new core.
        An answer that was begun ends with the files that it began with: where these were changed, and no other replica
        has them any more, the old core goes on until it has finished it. Cores in reserve are started again first: they
        take the place of the old ones at once.

        Raises:
            EngineStateError: this is being done already.
            ConfigError: the model's configuration or tokenizer was changed, which this process has read too.
            EngineDeadError: a core could not be started; those of the replicas after it run on.
            OctavoError: a core in reserve could not load the model; nothing was changed.
        """
        if self._restarting:
            raise EngineStateError("the replicas are being started again already")
        self._restarting = True
        # A caller that goes away leaves nothing half done.
        await asyncio.shield(self._replicas.run(self._restart_all()))

    async def _restart_all(self) -> None:
        try:
            await self._replicas.starter.check_files()
            began = time.monotonic()
            for replica in self._replicas.all:
                await self._replicas.starter.renew_reserve(began)
                replica.is_restarting = True
                try:
                    await self._restart(replica)
                finally:
                    replica.is_restarting = False
        finally:
            self._restarting = False

    async def _restart(self, replica: Replica) -> None:
        while replica.status == "starting":
            await asyncio.sleep(_POLL)
        old = replica.client
        if replica.lives:
            replica.status = "drained"
            next_digest = await self._replicas.starter.digest_now()
            while replica.open and old.error is None:
                await self._move(replica, next_digest)
                await asyncio.sleep(_POLL)
        if replica.client is old and (old.error is None or replica.status == "dead"):
            await self._replicas.replace(replica)
        while replica.status == "starting":  # it was lost meanwhile, and is started again for that
            await asyncio.sleep(_POLL)
        if not replica.lives:
            raise EngineDeadError(f"replica {replica.number} could not be started again")
