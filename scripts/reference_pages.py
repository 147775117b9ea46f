"""Pages of the site that are made from the code: options, request fields, metrics and alert rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from octavo.cli import chat, generate, reference
from octavo.cli.flags import value_kind
from octavo.config.engine_config import PARTS
from octavo.config.server_options import ServerOptions
from octavo.config.sources import RESERVED_VARIABLES
from octavo.core.sampling_params import Parameter, SamplingParams, parameters

RULES = Path(__file__).resolve().parent.parent / "deploy" / "prometheus" / "octavo-rules.yml"

HEAD = """\
# Options

## Engine options

An option can be given, each source winning over the one before it, in a YAML file (`--config octavo.yaml`; hyphens or
underscores), as environment variable (`OCTAVO_MAX_NUM_SEQS=16`), as flag (`--max-num-seqs 16`), or as keyword
(`LLM(model, max_num_seqs=16)`). A name that does not exist is refused with the nearest one that does. In variables and
flags `none` resets an option that may be unset. For `generate` and `chat` the flag of `seed` is `--engine-seed`, as
`--seed` there is a sampling parameter.

An option that is given and has no effect beside the others (`max_loras` without `enable_lora`, `enforce_eager` on a
CPU) is named in the log at start, with what decides instead; where memory or weights would not be those that were asked
for (`gpu_memory_utilization` with `num_gpu_blocks_override`, `revision` of a folder), the options are refused:
`octavo/config/engine_config.py`.
"""

PART_HEAD = """
### {title}

{what}

| option | value | default | what it does |
| --- | --- | --- | --- |
"""

SAMPLING_HEAD = """
## Sampling parameters

Fields of `SamplingParams`; flags of `octavo generate` and `octavo chat` (`--top-p 0.9`), with defaults of their own;
keys of a line of JSON input; fields of a request over HTTP, with the defaults of `SamplingParams` (of a chat,
`max_tokens` has none).
`logits_processors` (a list of callables) exists in Python only.

A model's `generation_config.json` (of a GGUF file its keys `general.sampling.*`, of a built-in model its authors) may
set `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` and `max_new_tokens` (here `max_tokens`);
`octavo info MODEL` shows which apply. Its values come before all defaults of this table: for a call of `LLM.generate`
or `LLM.chat` without `SamplingParams`, for flags and for fields of a request that are left out. `SamplingParams` that
are given are never changed. The engine option `generation_config` names another folder, or `none`.

| parameter | default | `generate` | `chat` | what it does |
| --- | --- | --- | --- | --- |
"""

SERVER_HEAD = """
## Server options

Flags of `octavo serve` (`--port 9000`), beside those of the engine; also variables (`OCTAVO_PORT=9000`) and keys of the
YAML file (`port: 9000`), as engine options are. The other commands leave them in a shared file unread.

| option | value | default | what it does |
| --- | --- | --- | --- |
"""

VARIABLES_HEAD = """
## Other environment variables

| variable | what it does |
| --- | --- |
"""


def options() -> str:
    """Every engine option, server option and sampling parameter."""
    lines = [HEAD]
    for title, part in PARTS.items():
        lines.append(PART_HEAD.format(title=title, what=part.__doc__))
        lines += _option_rows(part)
    lines.append(SERVER_HEAD)
    lines += _option_rows(ServerOptions)
    lines.append(SAMPLING_HEAD)
    for parameter in parameters(SamplingParams).values():
        defaults = [parameter.default, *(_default(command, parameter) for command in (generate, chat))]
        lines.append(_row(f"`{parameter.name}`", *map(_code, defaults), parameter.description))
    lines.append(VARIABLES_HEAD)
    lines += [_row(f"`{name}`", text) for name, text in RESERVED_VARIABLES.items()]
    return "".join(lines)


def _default(command: Any, parameter: Parameter) -> Any:
    """The default of a command's flag; a dash where it has none."""
    if parameter.name in getattr(command, "LEAVE_OUT", ()):
        return "-"
    return command.DEFAULTS.get(parameter.name, parameter.default)


def _option_rows(options: type[BaseModel]) -> list[str]:
    return [
        _row(
            f"`{name}`",
            value_kind(field),
            "" if field.is_required() else _code(field.default),
            field.description or "",
        )
        for name, field in options.model_fields.items()
    ]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _code(value: object) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def alert_rules() -> list[dict[str, Any]]:
    """The alert rules of ``deploy/``."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metrics() -> str:
    """Every series of ``/metrics``, and the alert rules."""
    lines = [reference.metrics(), "\n## Alert rules\n\n`deploy/prometheus/octavo-rules.yml`:\n"]
    for rule in alert_rules():
        when = f"{rule['labels']['severity']}, after {rule['for']}"
        lines.append(f"\n**`{rule['alert']}`** ({when}): {rule['annotations']['summary']}\n")
        lines.append(f"\n```promql\n{rule['expr'].strip()}\n```\n")
    return "".join(lines)


#: By name of the page.
PAGES = {"options.md": options, "request-fields.md": reference.request_fields, "metric-series.md": metrics}
