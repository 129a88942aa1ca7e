"""Makes docs/metrics.md, the reference of all metrics, of their definitions.

    python scripts/metrics.py [--check]

With --check nothing is written, and the exit code is 1 where the file is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from kuberoll_api.metrics import LABELS, Group, Histogram, Metric
from kuberoll_operator import metric_definitions as operator
from kuberoll_workers.telemetry import definitions as workers

ROOT: Final = Path(__file__).resolve().parents[1]
OUTPUT: Final = ROOT / "docs" / "metrics.md"

_HEAD = """\
# Metrics

Made by `make crd` of `workers/kuberoll_workers/telemetry/definitions.py` and
`operator/kuberoll_operator/metric_definitions.py`. A histogram has `_bucket`, `_count` and `_sum` series (that of
rewards, which may be negative, has no sum); a sum over `_count` is a mean. What to look at when something is wrong is
in [alerts.md](alerts.md).

The engine's own metrics, `ray_vllm_*` and `ray_serve_*`, are Ray's: a generation pod shows them on port 8080.
"""

_WORKERS = """\
Each worker pod shows them at `/metrics`, on the port of its progress ([pods.md](pods.md)); `kuberoll run` shows those
of all its worker processes together, at the address that it prints. Gauges are of one worker: add up, or take the
greatest of, what the pods of a job show.
"""

_OPERATOR = """\
The operator shows them at `/metrics` ([operating.md](operating.md)).
"""

_LABELS = """\
Labels have few values, so that the number of series does not grow with the number of trajectories.
"""


def reference() -> str:
    """The text of docs/metrics.md."""
    parts = [
        _HEAD,
        "## Workers\n",
        _WORKERS,
        *_tables(workers.GROUPS),
        "## Operator\n",
        _OPERATOR,
        *_tables(operator.GROUPS),
        "## Labels\n",
        _LABELS,
        _table(("label", "values"), ((f"`{name}`", bound) for name, bound in LABELS.items())),
    ]
    return "\n".join(parts)


def _tables(groups: Iterable[Group]) -> Iterator[str]:
    for group in groups:
        yield f"### {group.title}\n"
        yield _table(("name", "type", "unit", "labels", "what"), (_row(metric) for metric in group.metrics))


def _row(metric: Metric) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    text = metric.help
    if isinstance(metric, Histogram):
        text += f" Buckets from {metric.buckets[0]:g} to {metric.buckets[-1]:g}."
    return f"`{metric.name}`", type(metric).__name__.lower(), metric.unit, labels, text


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def main() -> None:
    """The command's entry point."""
    text = reference()
    stale = not OUTPUT.is_file() or OUTPUT.read_text() != text
    if "--check" in sys.argv[1:]:
        if stale:
            print(f"{OUTPUT.relative_to(ROOT)} is stale: run make crd")
        sys.exit(stale)
    if stale:
        OUTPUT.write_text(text)


if __name__ == "__main__":
    main()
