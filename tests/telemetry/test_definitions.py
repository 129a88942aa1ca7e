"""What the definitions promise: names, units, bounded labels; and that whatever names a metric names a defined one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import prometheus_client as prometheus
import pytest

from kuberoll_api import metrics as api
from kuberoll_operator import metric_definitions as operator
from kuberoll_operator.metrics import Metrics
from kuberoll_operator.model import Key
from kuberoll_workers.telemetry import RolloutMetrics, turn_bucket
from kuberoll_workers.telemetry import definitions as workers

ROOT = Path(__file__).resolve().parents[2]
ALL = {**workers.METRICS, **operator.METRICS}
TYPES = {"counter": api.Counter, "gauge": api.Gauge, "histogram": api.Histogram}
# They do not count things of one kind, or have the name that the field knows.
UNITS_NOT_IN_NAMES = {"kuberoll_operator_queue_depth", "kuberoll_operator_leader", "kuberoll_policy_lag"}


@pytest.mark.parametrize("name", ALL)
def test_names_and_units(name: str) -> None:
    metric = ALL[name]
    assert re.fullmatch(r"kuberoll_[a-z]+(_[a-z]+)*", name)
    assert name.startswith("kuberoll_operator_") == (name in operator.METRICS)
    assert metric.unit in name.split("_") or name in UNITS_NOT_IN_NAMES
    assert name.endswith("_total") == isinstance(metric, api.Counter)
    assert not name.endswith(("_count", "_sum", "_bucket"))
    assert re.fullmatch(r"[A-Z1].*\.", metric.help)


def test_labels_are_of_a_closed_list_that_says_what_bounds_each() -> None:
    assert set(api.LABELS) == set(get_args(api.Label))
    assert {label for metric in ALL.values() for label in metric.labels} == set(api.LABELS)
    with pytest.raises(ValueError, match="session_id: not a known label"):
        api.Counter(name="kuberoll_x_total", help="X.", unit="x", labels=("session_id",))  # type: ignore[arg-type]


def test_a_name_is_defined_once() -> None:
    assert not set(workers.METRICS) & set(operator.METRICS)
    metric = api.Counter(name="kuberoll_x_total", help="X.", unit="x")
    with pytest.raises(ValueError, match="kuberoll_x_total: two metrics"):
        api.metrics_by_name([api.MetricGroup("A", (metric,)), api.MetricGroup("B", (metric,))])


def test_every_definition_is_in_the_reference() -> None:
    for module in (workers, operator):
        defined = {value.name for value in vars(module).values() if isinstance(value, api.Metric)}
        assert defined == set(module.METRICS)


def test_buckets_rise() -> None:
    for metric in ALL.values():
        if isinstance(metric, api.Histogram):
            assert list(metric.buckets) == sorted(set(metric.buckets))
            assert metric.buckets


def test_turns_are_of_seven_buckets() -> None:
    buckets = list(dict.fromkeys(turn_bucket(turn) for turn in range(1, 100_000)))
    assert ", ".join(buckets) == api.LABELS["turn"]


def shown(registry: prometheus.CollectorRegistry) -> dict[str, str]:
    ending = {"counter": "_total"}
    return {family.name + ending.get(family.type, ""): family.type for family in registry.collect()}


def fits(found: Mapping[str, str], defined: Mapping[str, api.Metric]) -> None:
    assert set(found) == set(defined)
    for name, kind in found.items():
        assert isinstance(defined[name], TYPES[kind])


def test_workers_show_what_is_defined() -> None:
    metrics = RolloutMetrics("test")
    # Those of a trainer are there if the run has one, and of the direct path if the worker serves it.
    assert metrics.consumer
    assert metrics.direct
    fits(shown(metrics.registry), workers.METRICS)


def test_the_operator_shows_what_is_defined() -> None:
    metrics = Metrics()
    generation = {"readyReplicas": 1, "desiredReplicas": 2}
    spec = {"generation": {"resources": {"limits": {"nvidia.com/gpu": "4"}}, "engineArgs": {"tensor_parallel_size": 4}}}
    jobs: Any = [(Key("lab", "job"), {"spec": spec, "status": {"phase": "Running", "generation": generation}})]
    metrics.watch(
        jobs=lambda: jobs, depth=lambda: 0, oldest=lambda: 0.0, leading=lambda: True, cached=lambda: {"Pod": 1}
    )
    fits(shown(metrics.registry), operator.METRICS)
    labels = {"namespace": "lab", "rolloutjob": "job", "state": "desired"}
    assert metrics.registry.get_sample_value("kuberoll_operator_generation_replicas", labels) == 2
    assert metrics.registry.get_sample_value("kuberoll_operator_generation_gpus", labels) == 8
    for family in metrics.registry.collect():
        for sample in family.samples:
            name = family.name + ("_total" if family.type == "counter" else "")
            assert set(sample.labels) - {"le"} == set(operator.METRICS[name].labels)


@pytest.mark.parametrize("file", ["scripts/dashboards.py", "workers/kuberoll_workers/monitor/alerts.yaml"])
def test_dashboards_and_alerts_name_what_is_defined(file: str) -> None:
    text = (ROOT / file).read_text().replace("kuberoll_turn_{phase}_seconds", "kuberoll_turn_waiting_seconds")
    # A replica's own, `ray_kuberoll_…`, are in the recorded pages of Ray (tests/monitoring).
    named = set(re.findall(r"(?<!ray_)kuberoll_[a-z_]+", text)) - {"kuberoll_workers", "kuberoll_operator"}
    series = set(ALL)
    for name, metric in ALL.items():
        if isinstance(metric, api.Histogram):
            series |= {f"{name}_{part}" for part in ("bucket", "count", "sum")}
    assert len(named) > 5
    assert named <= series


def test_the_reference_is_not_stale() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.metrics", "--check"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
