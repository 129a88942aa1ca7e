"""Every query of every dashboard and alert, on what the workers, the operator and Ray export.

Real are: the worker, with failures and tries again, the operator's metrics, Prometheus. What Ray exports with two
replicas of vLLM is recorded (`record.py`); `test_monitor` holds the record to a real engine.
"""

from __future__ import annotations

import asyncio
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, start_http_server

from kuberoll_api import conditions
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator.metrics import Metrics
from kuberoll_operator.model import Key, Object
from kuberoll_workers.data.consumer_counts import ConsumerCounts
from kuberoll_workers.monitor.prometheus import Target, prometheus
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.telemetry import Meters, RolloutMetrics, definitions
from kuberoll_workers.worker.config import Progress, WorkerConfig
from kuberoll_workers.worker.run import run_worker
from tests.local.support import TINY, Endpoint
from tests.monitoring.support import (
    Api,
    PanelQuery,
    QueryFailed,
    filled,
    metric_names,
    pages,
    panel_queries,
    until,
    variable_queries,
)

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
    pytest.mark.timeout(300),
]

RECORDED = sorted((Path(__file__).parent / "data").glob("ray-*.txt"))

# Panels without values here, and why.
NOTHING_TO_SHOW = {
    "rollouts: Trajectories moved to another replica": "there is one replica",
    "generation: Preemptions": "Ray's counters are not there before they count, and the cache was never full",
}
NEVER_COUNTED = {"ray_vllm_num_preemptions_total"}

JOBS: list[tuple[Key, Object]] = [
    (Key("lab", "test"), {"status": {"phase": "Running", "generation": {"readyReplicas": 2, "desiredReplicas": 2}}}),
    (Key("lab", "done"), {"status": {"phase": "Succeeded"}}),
    (
        Key("lab", "stuck"),
        {
            "status": {
                "phase": "Starting",
                "conditions": [{"type": "GenerationReady", "status": "False", "reason": "Unschedulable"}],
            }
        },
    ),
]

SANDBOX_SERIES = [
    *((definitions.SANDBOX_STARTS, (result,)) for result in ("started", "failed")),
    *((definitions.SANDBOX_REMOVALS, (result,)) for result in ("removed", "failed")),
    *((metric, ()) for metric in definitions.SANDBOXES if "result" not in metric.labels),
]

SCRAPE_SECONDS = 0.5
FIRST, SECOND = 60, 160
"""Requests after which the endpoint holds the others up."""


@dataclass(frozen=True)
class Seen:
    """What Prometheus said.

    Attributes:
        series: By query: labels and values; or why it was refused.
        declared: Names of all metrics whose type was scraped.
        rules: Those of the alerts, as evaluated.
        variables: Values of the dashboards' variables.
        up: Targets that answered.
    """

    series: dict[PanelQuery, list[tuple[dict[str, str], float]] | str]
    declared: set[str]
    rules: list[dict[str, Any]]
    variables: dict[str, list[str]]
    up: dict[str, float]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return asyncio.run(_look(tmp_path_factory.mktemp("monitoring")))


@pytest.mark.parametrize("query", panel_queries(), ids=str)
def test_a_query_of_a_panel(seen: Seen, query: PanelQuery) -> None:
    found = seen.series[query]
    assert not isinstance(found, str), found
    unknown = metric_names(query.expression) - seen.declared
    assert unknown <= NEVER_COUNTED
    if f"{query.dashboard}: {query.panel}" in NOTHING_TO_SHOW:
        return
    assert any(math.isfinite(value) for _, value in found), found
    for labels, _ in found:
        assert query.labels <= {name for name, value in labels.items() if value}, "the legend has none of these"


def test_the_exceptions_are_some() -> None:
    assert set(NOTHING_TO_SHOW) <= {f"{query.dashboard}: {query.panel}" for query in panel_queries()}


def test_alerts_can_be_evaluated(seen: Seen) -> None:
    assert {rule["name"] for rule in seen.rules} >= {"KuberollJobStalled", "KuberollOperatorNotReconciling"}
    for rule in seen.rules:
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule
        assert metric_names(rule["query"]) <= seen.declared, rule
        if rule["name"] == "KuberollJobWaiting":
            [alert] = rule["alerts"]
            assert (alert["labels"]["rolloutjob"], alert["labels"]["reason"]) == ("stuck", "Unschedulable")
            continue
        # An environment fails on purpose, and this machine may be busy.
        assert rule["alerts"] == [] or rule["name"] in {"KuberollFailureBudgetBurning", "KuberollEventLoopLag"}, rule


def test_variables_have_values(seen: Seen) -> None:
    assert seen.variables == {
        "fleet: namespace": ["lab"],
        "generation: namespace": ["lab"],
        "generation: job": ["test"],
        "rollouts: namespace": ["lab"],
        "rollouts: job": ["test"],
        "rollouts: environment": ["flaky", "puzzle"],
    }


def test_nothing_is_renamed(seen: Seen) -> None:
    assert seen.up == {"worker": 1, "engine": 1, "operator": 1}
    for found in seen.series.values():
        if not isinstance(found, str):
            assert not any(name.startswith("exported_") for labels, _ in found for name in labels)


async def _look(directory: Path) -> Seen:
    operator = Metrics()
    metrics = RolloutMetrics("test")
    with ExitStack() as stack:
        ports = {
            "worker": stack.enter_context(_exported(metrics.registry)),
            "operator": stack.enter_context(_exported(operator.registry)),
            "engine": stack.enter_context(pages([path.read_text() for path in RECORDED])),
        }
        # As the chart's monitors have them: the pod's namespace, and for Ray's metrics the job.
        labels = {
            "worker": {"namespace": "lab"},
            "engine": {"namespace": "lab", "rolloutjob": "test"},
            "operator": {},
        }
        targets = [Target(name=name, address=f"127.0.0.1:{port}", labels=labels[name]) for name, port in ports.items()]
        async with (
            Endpoint().serving() as endpoint,
            aiohttp.ClientSession() as http,
            prometheus(targets, directory / "prometheus", seconds=SCRAPE_SECONDS) as url,
        ):
            api = Api(url, http)
            operator.watch(
                jobs=lambda: JOBS, depth=lambda: 1, oldest=lambda: 0.5, leading=lambda: True, cached=lambda: {"Pod": 3}
            )
            _let_the_operator_work(operator)
            _let_a_trainer_take(metrics, 1)
            sandboxes = Meters(SANDBOX_SERIES)
            metrics.environment("puzzle").meters.watch(sandboxes)
            _let_sandboxes_start(sandboxes)
            await _run(api, endpoint, metrics, operator, directory, sandboxes)
            return await _ask(api)


async def _run(
    api: Api, endpoint: Endpoint, metrics: RolloutMetrics, operator: Metrics, directory: Path, sandboxes: Meters
) -> None:
    """A worker that is seen twice on its way, and once more with one trajectory that does not end."""
    (directory / "out").mkdir()
    background = asyncio.create_task(metrics.watch_event_loop())
    limit = FIRST
    endpoint.holds = lambda _: len(endpoint.requests) >= limit
    # Refused once, then answered: tried again. Never answered: given up.
    tried: set[str] = set()

    def refuses(request: Any) -> bool:
        if request.session_id.startswith("1-"):
            return True
        first = request.session_id.startswith("2-") and request.request_id not in tried
        tried.add(request.request_id)
        return first

    endpoint.refuses = refuses
    task = asyncio.create_task(_work(endpoint, metrics, directory / "out"))

    async def turns(at_least: float) -> bool:
        return await api.number("sum(kuberoll_turns_total)") >= at_least

    async def reconciles(at_least: float) -> bool:
        return await api.number("sum(kuberoll_operator_reconciles_total)") >= at_least

    try:
        # Turns are counted after their requests.
        await until(lambda: turns(FIRST / 2), task)
        await until(lambda: reconciles(1), task)
        seen_first = await api.number("sum(kuberoll_turns_total)")
        # Prometheus sees the increase of what it has seen before.
        reconciled = await api.number("sum(kuberoll_operator_reconciles_total)")
        _let_the_operator_work(operator)
        _let_a_trainer_take(metrics, 2)
        _let_sandboxes_start(sandboxes)
        limit = SECOND
        held, endpoint.released = endpoint.released, asyncio.Event()
        held.set()
        await until(lambda: turns(seen_first + 20), task)
        await until(lambda: reconciles(reconciled + 1), task)
        endpoint.holds = lambda request: request.session_id == "5-0-0"
        endpoint.released.set()
        endpoint.released = asyncio.Event()
        finished = "sum(kuberoll_trajectories_stored) + sum(kuberoll_trajectories_abandoned)"

        async def ended() -> bool:
            return await api.number(finished) >= await api.number("sum(kuberoll_trajectories_planned)") - 1

        await until(ended, task)
        # The recorded pages one after the other, and each of the others' last words at least twice.
        await until(lambda: _scraped(api, len(RECORDED) + 2), task)
    finally:
        task.cancel()
        background.cancel()
        await asyncio.gather(task, background, return_exceptions=True)


def _let_a_trainer_take(metrics: RolloutMetrics, times: int) -> None:
    """What a worker publishes when its run's plan says that so many batches were taken."""
    counts = ConsumerCounts(
        taken_groups=4 * times,
        ready_groups=1,
        stale_trajectories=times,
        stale_tokens=5 * times,
        lag={0: 8 * times, 2: times},
        waited_seconds=0.5 * times,
        publications=times,
        publish_seconds={"write": 0.25 * times, "load": 0.5 * times},
    )
    metrics.consumer.update(counts, since_start=False)
    metrics.consumer.hold(0.5)
    # And what it has of the worker itself.
    metrics.direct.wait(1)
    metrics.direct.hand_over(4, 4000, gap=times == 2)


def _let_sandboxes_start(sandboxes: Meters) -> None:
    """What an environment counts that has sandboxes: three start, and one is removed."""
    for seconds in (0.2, 0.4, 3.0):
        sandboxes.add(definitions.SANDBOX_STARTS, "started")
        sandboxes.observe(definitions.SANDBOX_START_SECONDS, seconds)
    sandboxes.add(definitions.SANDBOXES_IN_USE, by=2)
    sandboxes.add(definitions.SANDBOX_REMOVALS, "removed")


async def _scraped(api: Api, times: int) -> bool:
    return await api.number("min(count_over_time(up[5m]))") >= times


async def _work(endpoint: Endpoint, metrics: RolloutMetrics, output: Path) -> None:
    settings = {"size": 2, "shuffleMoves": 6, "maxMoves": 6}
    document = {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "test"},
        "spec": {
            "generation": {"model": {"source": str(TINY)}, "engine": "Simulated"},
            "environments": [
                {"name": "puzzle", "type": "sliding_puzzle", "config": settings},
                {"name": "flaky", "type": "sliding_puzzle", "config": settings},
            ],
            "dataset": {"source": {"generator": {"count": 8}}, "repeats": 4},
            "rollout": {"concurrency": 16, "retries": {"generationAttempts": 2, "backoffSeconds": 0}},
        },
    }
    config = WorkerConfig(
        job=RolloutJob.model_validate(document),
        base="/",
        tokenizer=str(TINY),
        endpoint=endpoint.url,
        max_model_len=512,
        output=str(output),
        turns=str(output),
        shards=[0],
        shard_count=1,
        planned=64,
    )
    await run_worker(config, metrics=metrics, drain=Drain(), progress=Progress())


def _let_the_operator_work(metrics: Metrics) -> None:
    """What a reconciler says of itself."""
    now = datetime.now(UTC)
    created = {"metadata": {"creationTimestamp": (now - timedelta(seconds=70)).strftime("%Y-%m-%dT%H:%M:%SZ")}}
    ready = {"conditions": [{"type": conditions.GENERATION_READY, "status": "True"}]}
    for _ in range(5):
        metrics.record_wait(0.01)
        metrics.record_request("patch", "Deployment", 200)
        metrics.record_reconcile("success", 0.02)
    metrics.record_error("Conflict")
    metrics.record_reconcile("retry", 0.1)
    metrics.record_status(created, {}, ready, now)


@contextmanager
def _exported(registry: CollectorRegistry) -> Iterator[int]:
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def _ask(api: Api) -> Seen:
    series: dict[PanelQuery, list[tuple[dict[str, str], float]] | str] = {}
    for query in panel_queries():
        try:
            series[query] = await api.query(filled(query.expression))
        except QueryFailed as error:
            series[query] = str(error)
    metadata = await api.get("metadata")
    groups = (await api.get("rules", type="alert"))["groups"]
    variables = {}
    for name, values in variable_queries().items():
        matched = re.fullmatch(r"label_values\((.*), (\w+)\)", values)
        assert matched is not None, values
        variables[name] = await api.get(f"label/{matched[2]}/values", **{"match[]": filled(matched[1])})
    return Seen(
        series=series,
        # OpenMetrics names a family of counters without their ending.
        declared={name + ending for name in metadata for ending in ("", "_total")},
        rules=[rule for group in groups for rule in group["rules"]],
        variables=variables,
        up={labels["job"]: value for labels, value in await api.query("up")},
    )
