"""Writes docs/metrics.md: every series of /metrics, from the code that serves it, and the alert rules of deploy/."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from octavo.server.metrics import Metrics

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "metrics.md"
ADVICE = ROOT / "scripts" / "metric_advice.yml"
RULES = ROOT / "deploy" / "prometheus" / "octavo-rules.yml"

HEAD = """\
# Metrics and alerts

This page is made by `make docs` from the code that serves `/metrics`, from `scripts/metric_advice.yml` and from
`deploy/prometheus/octavo-rules.yml`; change them there.

```bash
curl -s http://127.0.0.1:8000/metrics
docker compose -f deploy/docker-compose.yml up      # with Prometheus, its rules, Grafana and a dashboard
```

Look first at `octavo_requests{state="waiting"}` (do requests queue?), `octavo_time_to_first_token_seconds` (how long do
users wait?), `octavo_preemptions_total` (is the KV cache too small?) and `octavo_replica_up` (does everything run?).
Every series has the label `model_name`, beside those named here. [dashboards/grafana.json](../dashboards/grafana.json)
shows them all.
"""

#: What a kind appends to the names of its series.
KINDS = {"counter": "_total"}


def families() -> dict[str, tuple[str, str, list[str]]]:
    """(kind, text, labels) by name without "octavo_", in the order in which they are served."""
    metrics = Metrics("")
    labels = {}
    for collector in metrics.registry._collector_to_names:
        names = getattr(collector, "_labelnames", ())
        labels[getattr(collector, "_name", "")] = [name for name in names if name != "model_name"]
    return {
        family.name.removeprefix("octavo_"): (family.type, family.documentation, labels[family.name])
        for family in metrics.registry.collect()
        if family.name.startswith("octavo_")
    }


def rules() -> list[dict[str, Any]]:
    """The alert rules."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def series_in(expression: str) -> set[str]:
    """Names of the families in a rule's expression, without "octavo_" and without what a kind appends."""
    found = re.findall(r"\boctavo_(\w+)", expression)
    known = families()
    return {next((name for name in known if each in served(name, known[name][0])), each) for each in found}


def served(name: str, kind: str) -> list[str]:
    """Names of a family's series on the page."""
    if kind == "histogram":
        return [f"{name}_{part}" for part in ("bucket", "sum", "count")]
    return [name + KINDS.get(kind, "")]


def render() -> str:
    """The whole page."""
    advice = yaml.safe_load(ADVICE.read_text(encoding="utf-8"))
    alerts = [(rule["alert"], series_in(rule["expr"])) for rule in rules()]
    lines = [HEAD, "\n## Series\n\n| series | kind | labels | what it is | when to look, and what to do | alerts |\n"]
    lines.append("| --- | --- | --- | --- | --- | --- |\n")
    for name, (kind, text, labels) in families().items():
        of_it = ", ".join(f"`{alert}`" for alert, series in alerts if name in series)
        shown = ", ".join(f"`{label}`" for label in labels)
        lines.append(
            f"| `octavo_{name}{KINDS.get(kind, '')}` | {kind} | {shown} | {text} | {advice[name]} | {of_it} |\n"
        )
    lines += [
        "\nBesides, `process_*` of the Prometheus client: memory, processor time and open files of the front end.\n"
    ]
    lines.append(
        "\n## Alert rules\n\n`deploy/prometheus/octavo-rules.yml`, which `deploy/docker-compose.yml` mounts:\n"
    )
    return "".join([*lines, *_rule_lines()])


def _rule_lines() -> Iterator[str]:
    for rule in rules():
        when = f"{rule['labels']['severity']}, after {rule['for']}"
        yield f"\n**`{rule['alert']}`** ({when}): {rule['annotations']['summary']}\n"
        yield f"\n```promql\n{rule['expr'].strip()}\n```\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(render(), encoding="utf-8")
    print(f"== wrote {TARGET}")
