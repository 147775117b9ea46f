"""``AsyncLLM`` with vLLM's order of arguments."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from octavo.core.outputs import RequestOutput
from octavo.core.pooling_outputs import Pooled
from octavo.core.pooling_params import PoolingParams
from octavo.core.prompts import Prompt
from octavo.core.sampling_params import SamplingParams
from octavo.engine.async_llm import AsyncLLM as OctavoAsyncLLM
from octavo.engine.stat_loggers import StatLogger


class AsyncLLM(OctavoAsyncLLM):
    """Octavo's, made of ``AsyncEngineArgs``; the first request loads the model."""

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: Sequence[StatLogger] | None = None,
        **_: object,
    ) -> Self:
        """An engine with these options.

        Raises:
            ConfigError: an option is wrong.
        """
        return cls(engine_args.create_engine_config(), stat_loggers=stat_loggers or ())

    async def generate(  # type: ignore[override]
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        **keywords: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As Octavo's, whose order is request, prompt, parameters.

        Raises:
            OctavoError: see there.
        """
        async for output in super().generate(request_id, prompt, sampling_params, **keywords):
            yield output

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams, request_id: str, **keywords: Any
    ) -> AsyncGenerator[Pooled, None]:
        """What ``pool`` gives, as the one output of a stream.

        Raises:
            OctavoError: see there.
        """
        yield await self.pool(request_id, prompt, pooling_params, **keywords)

    async def abort(self, request_id: str | Iterable[str], *_: object, **__: object) -> None:
        """Ends one request or several."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            await super().abort(name)

    async def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As Octavo's, in vLLM's order of arguments."""
        return await super().collective_rpc(method, args, kwargs, timeout)

    async def check_health(self) -> None:
        """Raises if the engine has died.

        Raises:
            EngineDeadError: it has, or was shut down.
        """
        self.check_alive()

    async def do_log_stats(self) -> None:
        """Nothing: ``log_stats_interval`` writes status lines."""

    @property
    def errored(self) -> bool:
        """Whether requests cannot be accepted any more."""
        return self._error is not None

    @property
    def is_running(self) -> bool:
        """Whether requests can be accepted."""
        return self._error is None

    @property
    def dead_error(self) -> BaseException | None:
        """Why they cannot."""
        return self._error
