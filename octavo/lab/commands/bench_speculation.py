"""``octavo bench offline --speculative``: drafters against no drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import yaml

from octavo.cli.parsing import Arguments
from octavo.config.engine_config import make_config
from octavo.config.options import MODEL_METHODS, SpeculativeConfig
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.config.engine_config import EngineConfig
    from octavo.lab.bench.speculation import SpeculationFigures

TITLE = (
    "workload    batch  drafter               tok/s without  tok/s with  speed-up  accepted  tokens a draft"
    "  output tokens"
)


def line(figures: SpeculationFigures) -> str:
    """A line of the table."""
    f = figures
    drafts = f"{'-':>8}  {'-':>14}"
    if f.acceptance is not None and f.tokens_per_draft is not None:
        drafts = f"{f.acceptance:8.1%}  {f.tokens_per_draft:14.2f}"
    return (
        f"{f.workload:10}  {f.batch:5}  {f.method:20}  {f.tokens_per_s_without:13.1f}  {f.tokens_per_s:10.1f}"
        f"  {f.speedup:7.2f}x  {drafts}  {f.output_tokens:13}"
    )


def measure(arguments: Arguments, options: EngineConfig) -> Iterator[SpeculationFigures]:
    """The figures of each workload, batch size and drafter that ``--speculative`` names.

    Raises:
        ConfigError: there is no such drafter or field, or the length is no number.
    """
    from octavo.engine.llm import LLM
    from octavo.lab.bench import speculation
    from octavo.loader.builtin import SHAPES

    shared = options.speculative_config
    configs = {label: _labelled(shared, label) for label in map(str.strip, arguments.speculative.split(","))}
    if not arguments.output_len.isdigit():
        raise ConfigError(f"with --speculative, --output-len must be a number, not {arguments.output_len!r}")
    output_len = int(arguments.output_len)
    defaults = {
        "max_num_seqs": max(arguments.batches),
        "max_model_len": 512 + output_len,
        "skip_tokenizer_init": options.model in SHAPES,
        # What is repeated shall show what drafts bring, and no cached prompts.
        "enable_prefix_caching": False,
    }
    kept = {**defaults, **options.model_dump(exclude_unset=True)}

    def make(config: SpeculativeConfig | None) -> LLM:
        return LLM(**{**kept, "speculative_config": config or {"method": "none"}})

    return speculation.measure(make, configs, arguments.batches, output_len, arguments.rounds, options.seed)


def _labelled(shared: SpeculativeConfig | None, label: str) -> SpeculativeConfig:
    """The configuration with the label's method and fields (``METHOD:FIELD=VALUE:...``), values in YAML.

    Methods that take no model leave it out.
    """
    method, *changes = label.split(":")
    fields = shared.model_dump(exclude_unset=True) if shared is not None else {}
    if method not in (*MODEL_METHODS, "mtp"):
        fields = {name: value for name, value in fields.items() if name not in ("model", "quantization", "revision")}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ConfigError(f"--speculative {label!r}: after the method, fields are FIELD=VALUE, not {change!r}")
        fields[name] = yaml.safe_load(value)
    config = make_config(model="none", speculative_config={**fields, "method": method}).speculative_config
    assert config is not None
    return config
