"""The clients of a chaos run: they ask at random, and what they get is compared with the truth."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from octavo.lab.bench.chaos_answers import Answer, AnswerReader, difference, digest
from octavo.lab.bench.chaos_workload import CHAT, COMPLETIONS, ChaosRequest
from octavo.lab.bench.serve_client import ResponseError
from octavo.lab.bench.serve_http import CutOffError, Poster, ProtocolError

#: Salts, of which a client takes one for one of so many requests.
_SALTS, _ONE_OF = 8, 4
#: Arrivals that are kept of all streams together.
_RECENT = 4096


@dataclass(slots=True)
class Exchange:
    """A request that was sent and what came. Times in seconds of ``time.perf_counter()``."""

    request: ChaosRequest
    sent: float
    ended: float = 0.0
    #: Arrival of each chunk.
    chunks: array[float] = field(default_factory=lambda: array("d"))
    #: None once it is known to be the truth, and where there was an error.
    answer: Answer | None = None
    completion_tokens: int = 0
    #: What went wrong, such as "http 500: ..."; None: nothing.
    error: str | None = None
    #: Where the answer differs from the truth; None: nowhere.
    difference: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the client saw an error or another answer than the truth."""
        return self.error is not None or self.difference is not None


class ChaosClient:
    """Sends requests to a server and reads their streams, each on a connection of its own."""

    def __init__(self, url: str, patience: float) -> None:
        """``patience``: seconds without a chunk after which a stream counts as broken."""
        # A connection that is used again may be closed meanwhile, and the request be sent twice; a new one never is.
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "Connection": "close"}
        self._posters = {route: Poster(f"{url}/v1/{route}", headers) for route in (COMPLETIONS, CHAT)}
        self._patience = patience
        #: Arrivals of the last chunks of all streams (``time.perf_counter()``).
        self.recent: deque[float] = deque(maxlen=_RECENT)

    async def ask(self, request: ChaosRequest, salt: str = "") -> Exchange:
        """Sends a request and reads its stream; failures go into the exchange."""
        content = msgspec.json.encode(request.salted(salt) if salt else request.body)
        reader = AnswerReader()
        exchange = Exchange(request, time.perf_counter(), chunks=reader.chunks)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._patience) as limit:

                def feed(status: int, piece: bytes, now: float) -> None:
                    limit.reschedule(loop.time() + self._patience)
                    self.recent.append(now)
                    reader.feed(status, piece, now)

                reader.end(await self._posters[request.route].post(content, feed))
            exchange.answer = reader.answer()
            exchange.completion_tokens = exchange.answer["usage"]["completion_tokens"]
        except TimeoutError:
            exchange.error = f"nothing came for {self._patience:g} s"
        except ResponseError as e:
            exchange.error = f"{e.kind}: {e.text}"
        except (CutOffError, ProtocolError, OSError) as e:
            exchange.error = f"{type(e).__name__}: {e}"
        exchange.ended = time.perf_counter()
        return exchange


class Checker:
    """Knows the truth, and compares answers with it."""

    def __init__(self, truths: Mapping[str, Answer]) -> None:
        """``truths``: the answer of each request alone, by the request's name."""
        self.truths = dict(truths)
        self._digests = {name: digest(answer) for name, answer in truths.items()}

    def check(self, exchange: Exchange) -> None:
        """Notes in the exchange where its answer differs; forgets the answer if it does not."""
        if exchange.error is not None or exchange.answer is None:
            return
        name = exchange.request.name
        if digest(exchange.answer) == self._digests[name]:
            exchange.answer = None
        else:
            exchange.difference = difference(self.truths[name], exchange.answer) or "other bits"


async def ask_each(client: ChaosClient, requests: Sequence[ChaosRequest]) -> list[Exchange]:
    """Asks each request alone, one after the other."""
    return [await client.ask(request) for request in requests]


async def ask_at_random(
    client: ChaosClient,
    requests: Sequence[ChaosRequest],
    checker: Checker,
    *,
    clients: int,
    seed: int,
    goes_on: Callable[[], bool],
    exchanges: list[Exchange],
) -> None:
    """``clients`` clients, each asking one request after the other; appends and checks what they get.

    A client begins no further request once ``goes_on`` says no; each asks at least one.
    """

    async def work(number: int) -> None:
        chosen = random.Random(f"{seed}/{number}")
        while True:
            salt = chosen.randrange(_ONE_OF * _SALTS)
            exchange = await client.ask(chosen.choice(requests), f"salt-{salt}" if salt < _SALTS else "")
            checker.check(exchange)
            exchanges.append(exchange)
            if not goes_on():
                return

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(work(number))
