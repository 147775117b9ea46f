"""``octavo bench grammar``: prints what structured output costs."""

from __future__ import annotations

from typing import IO

from octavo.cli.flags import read_engine_config
from octavo.cli.parsing import Arguments
from octavo.core.errors import ConfigError
from octavo.lab.commands.records import show_one


def run(arguments: Arguments, model: str | None, stream: IO[str] | None) -> None:
    """Measures masks, throughput and first tokens of a model; records go as JSON lines to ``stream``, if there is one.

    Raises:
        ConfigError: the length of outputs is no number.
    """
    from octavo.cli.info import usable_cores
    from octavo.engine.llm import LLM
    from octavo.lab.bench import grammar_cost

    options = read_engine_config(arguments, model)
    if not arguments.output_len.isdigit():
        raise ConfigError(f"--output-len of bench grammar must be a number, not {arguments.output_len!r}")
    output_len = int(arguments.output_len)
    defaults = {"max_model_len": 64 + output_len, "max_num_seqs": max(arguments.batches)}
    llm = LLM(**{**defaults, **options.model_dump(exclude_unset=True)})

    title = "properties   bytes  compile ms  tokens  forced  mask us: p50      p99  step ms: p50      p99"
    for f in grammar_cost.measure_masks(llm, options.num_threads or usable_cores(), options.seed):
        if isinstance(f, grammar_cost.VocabularyFigures):
            made = f"a vocabulary of {f.vocab_size} tokens: {f.seconds:.2f} s of processor time, once"
            show_one(f, stream, f"{made}\nmasks; a step has {grammar_cost.ROWS} sequences\n{title}")
            continue
        share = f"{f.forced_share:6.0%}  {f.mask_us_p50:12.1f}  {f.mask_us_p99:7.1f}"
        size = f"{f.properties:10}  {f.schema_bytes:6}  {f.compile_ms:10.2f}  {f.output_tokens:6.0f}"
        show_one(f, stream, f"{size}  {share}  {f.step_ms_p50:12.3f}  {f.step_ms_p99:7.3f}")
    if stream is None:
        print("batch  tok/s without  with a schema  ratio  of processor time")
    for t in grammar_cost.measure_throughput(llm, arguments.batches, output_len, arguments.rounds, options.seed):
        rates = f"{t.tokens_per_s_free:13.1f}  {t.tokens_per_s:13.1f}"
        show_one(t, stream, f"{t.batch:5}  {rates}  {t.ratio:5.2f}  {t.processor_ratio:17.2f}")
    d = grammar_cost.measure_delay(llm)
    added = f"{d.added_ms:+.2f} ms, of processor time {d.added_processor_ms:+.2f} ms"
    show_one(d, stream, f"first token: {d.free_ms:.2f} ms without, {d.bound_ms:.2f} ms with a known schema; {added}")
