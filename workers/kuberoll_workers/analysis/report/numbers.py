"""Numbers of a report: those of the run's aggregates, and the bars of its charts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from kuberoll_workers.analysis.aggregation.aggregates import Aggregates
from kuberoll_workers.analysis.aggregation.environments import statistics_of
from kuberoll_workers.analysis.aggregation.sources import Failure
from kuberoll_workers.analysis.aggregation.table import REWARD, SECONDS, TOKENS, TURNS
from kuberoll_workers.analysis.report.distance import distance
from kuberoll_workers.analysis.report.histogram import bars
from kuberoll_workers.analysis.report.observer import ReportObserver
from kuberoll_workers.analysis.report.sandboxes import Sandboxes
from kuberoll_workers.analysis.report.spread import spread
from kuberoll_workers.analysis.statistics import describe
from kuberoll_workers.data.text import one_line

_MOST_CAUSES = 50
_CAUSE_LENGTH = 300

_FIELDS = {
    "reward": REWARD,
    "turns": TURNS,
    "prompt": TOKENS[0],
    "generated": TOKENS[1],
    "observed": TOKENS[2],
    "generation_seconds": SECONDS[0],
    "environment_seconds": SECONDS[1],
}
_WHOLE = {TURNS, *TOKENS}


def run_numbers(aggregates: Aggregates, observer: ReportObserver) -> dict[str, Any]:
    """`{"all": …, "environments": [{"name": …}, …]}`: numbers of all environments together, and of each one.

    Each entry has `finished`, `outcomes` by name, `causes` of failures, a histogram for each of seven fields,
    `groups`, `throughput` over time, policy `versions`, `sandboxes` (None: there are none) and `removal` (None: nothing
    was removed, or of several environments); the first one also the `distance` from the bound.

    Args:
        observer: It was offered all trajectories of the run.
    """
    summaries = sorted(aggregates.summaries.items())
    names = [name for name, summary in summaries if summary.trajectories or summary.failed or summary.dropped]
    listed = [_numbers(aggregates, observer, name, [name]) for name in names]
    everything = {**listed[0], "name": ""} if len(listed) == 1 else _numbers(aggregates, observer, "", names)
    found = distance(observer.throughput)
    for item in (everything, *listed):
        # Environments differ: all together say nothing.
        removal = aggregates.removals.get(names[0] if len(names) == 1 else item["name"])
        item["removal"] = None if removal is None else removal.as_json()
    everything["distance"] = None if found is None else found.as_json()
    return {"all": everything, "environments": listed}


def _numbers(
    aggregates: Aggregates, observer: ReportObserver, name: str, environments: Sequence[str]
) -> dict[str, Any]:
    summaries = [aggregates.summaries[environment] for environment in environments]
    outcomes: Counter[str] = Counter()
    for summary in summaries:
        outcomes.update(summary.stop_reasons + Counter(failed=summary.failed) + summary.dropped)
    causes: Counter[tuple[str, str, str]] = Counter(
        (failure.kind, failure.stage, _cause(failure))
        for failure in aggregates.contents.failures.values()
        if failure.environment in environments
    )
    by_count = sorted(causes.items(), key=lambda item: (-item[1], item[0]))
    tasks = [aggregates.tasks[environment] for environment in environments]
    return {
        "name": name,
        "finished": sum(summary.trajectories for summary in summaries),
        "outcomes": dict(outcomes),
        "causes": [(*cause, count) for cause, count in by_count[:_MOST_CAUSES]],
        "other_causes": sum(count for _, count in by_count[_MOST_CAUSES:]),
        **{
            key: _histogram([some.frame.columns[field].values for some in tasks], whole=field in _WHOLE)
            for key, field in _FIELDS.items()
        },
        "groups": spread(tasks),
        "throughput": [stretch.as_json() for stretch in observer.throughput.stretches(environments)],
        "versions": observer.versions.of(environments),
        "sandboxes": _sandboxes(observer.sandboxes.of(environments)),
    }


def _sandboxes(found: Sandboxes | None) -> dict[str, Any] | None:
    """A histogram of the seconds of their starts with its 95th percentile, and counts; None: there are none."""
    if found is None:
        return None
    p95 = float(np.quantile(found.starts, 0.95, method="inverted_cdf"))
    counts = {"most": found.most, "lost": found.lost, "left": found.left}
    return {"starts": {**_histogram([found.starts], whole=False), "p95": p95}, **counts}


def _cause(failure: Failure) -> str:
    text = one_line(failure.cause, _CAUSE_LENGTH)
    return f"{text} ({one_line(failure.location, _CAUSE_LENGTH)})" if failure.location else text


def _histogram(columns: Sequence[Any], *, whole: bool) -> dict[str, Any]:
    """Aggregated statistics of a field, its sum, its 90th percentile, and its bars."""
    values = np.concatenate([np.empty(0), *columns])
    finite = values[np.isfinite(values)]
    statistics = statistics_of(describe(values), 0, of=len(values))
    return {
        **{key: statistics[key] for key in ("count", "nonfinite", "mean", "std", "min", "median", "max")},
        "p90": float(np.quantile(finite, 0.9, method="inverted_cdf")) if finite.size else None,
        "total": math.fsum(finite.tolist()),
        "whole": whole,
        "bars": bars(finite, whole=whole),
    }
