"""An engine that begins anew with the weights that it has loaded: a run for each policy, a load for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError, EngineStateError
from octavo.engine.core import EngineCore, block_settings
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.model_files import find_files
from octavo.memory.block_manager import BlockManager

#: Options that only the scheduler reads, see ``RestartableCore.restart``.
POLICY_OPTIONS = frozenset(
    {
        "scheduling_policy",
        "user_weights",
        "ttft_target",
        "tpot_target",
        "aging_limit",
        "preemption_victim",
        "priority_preemption",
        "adapt_num_seqs",
    }
)


class RestartableCore(EngineCore):
    """An engine core whose scheduler and blocks can be made anew, the blocks of another kind too."""

    #: Called as ``BlockManager`` is, by ``restart``.
    block_manager: Callable[..., BlockManager] = BlockManager

    def restart(self, changes: Mapping[str, Any]) -> None:
        """Empty blocks, and a scheduler that has learned nothing. ``changes``: new values of ``POLICY_OPTIONS``.

        Raises:
            ConfigError: another option is among them, on which the workers depend.
            EngineStateError: requests are unfinished, prefixes are pinned, or it sleeps.
        """
        if others := set(changes) - POLICY_OPTIONS:
            raise ConfigError(f"workers depend on {', '.join(sorted(others))}: make a new engine to change that")
        if self.has_work or self.is_sleeping or self.blocks.state.pinned:
            raise EngineStateError("to restart, an engine must be awake, without requests and without shared prefixes")
        plan = self.scheduler.schedule()  # the workers forget what has ended
        self.scheduler.update(plan, self.executor.submit(plan).wait())
        self.options = self.options.model_copy(update=dict(changes))
        sizes = self.startup.groups
        self.blocks = self.block_manager(sizes, self.options.block_size, **block_settings(self.options))
        self.use(self._new_scheduler(self.executor, sizes, self.scheduler.preparations))


def start(options: EngineConfig) -> tuple[RestartableCore, LLMEngine]:
    """Loads a model; see ``LLMEngine.from_config``."""
    files = find_files(options)
    core = RestartableCore(files.options, files.folder)
    return core, LLMEngine(files, core=core)


def restarted(core: RestartableCore, engine: LLMEngine, changes: Mapping[str, Any]) -> LLMEngine:
    """A new engine over the core, which begins anew; ``engine`` is the one before it, without requests."""
    core.restart(changes)
    return LLMEngine(replace(engine.front_end.files, options=core.options, prefixes=[]), core=core)
