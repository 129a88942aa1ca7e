"""`kuberoll top`: rates by the workers' counters, and by the status where those cannot be had."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from rich.console import Console

from kuberoll_api.metrics import Counter, Gauge
from kuberoll_operator import names
from kuberoll_operator.commands.top import page
from kuberoll_operator.console import rates
from kuberoll_operator.console.job_sampler import JobSampler
from kuberoll_operator.console.rates import (
    ACTIVE,
    TOKENS,
    TURNS,
    JobRow,
    JobSample,
    PodCounts,
    SandboxCounts,
    counts_of,
    row_of,
)
from kuberoll_operator.model import Object
from kuberoll_workers.telemetry import Meters, RolloutMetrics, definitions
from tests.operator.emulator import Emulator, Fault
from tests.operator.support import NAMESPACE, manifest, stamp


def metrics(turns: int, tokens: int, active: int) -> str:
    labels = 'rolloutjob="puzzle",environment="e"'
    return f"""# HELP kuberoll_turns_total Turns.
# TYPE kuberoll_turns_total counter
kuberoll_turns_total{{{labels},turn="1"}} {turns - 1}.0
kuberoll_turns_total{{{labels},turn="2"}} 1.0
kuberoll_turns_created{{{labels},turn="1"}} 1.7e+09
kuberoll_tokens_total{{{labels},kind="prompt"}} 100000.0
kuberoll_tokens_total{{{labels},kind="generated"}} {tokens}.0
kuberoll_trajectories_active{{{labels},state="generation"}} {active - 1}.0
kuberoll_trajectories_active{{{labels},state="environment"}} 1.0
something_else 3
"""


def test_the_names_are_those_of_the_workers() -> None:
    found = [definitions.TURNS.name, definitions.TOKENS.name, definitions.TRAJECTORIES_ACTIVE.name]
    assert found == [TURNS, TOKENS, ACTIVE]
    sandboxes = [rates.SANDBOX_STARTS, rates.SANDBOX_REMOVALS, rates.SANDBOXES_IN_USE]
    sandboxes += [rates.SANDBOXES_WAITING, rates.SANDBOXES_LOST]
    assert set(sandboxes) <= {metric.name for metric in definitions.SANDBOXES}


def test_counts() -> None:
    assert counts_of(metrics(7, 70, 5)) == PodCounts(7.0, 70.0, 5.0)
    assert counts_of("") == PodCounts(0.0, 0.0, 0.0)
    with pytest.raises(ValueError):
        counts_of("kuberoll_turns_total{broken")


def worker_page(*, lost: int) -> str:
    """What a worker exports that has sandboxes: two in use, one that starts, one start that failed, two not removed."""
    rollouts = RolloutMetrics("puzzle")
    counted: list[tuple[Counter | Gauge, tuple[str, ...], int]] = [
        (definitions.SANDBOXES_IN_USE, (), 2),
        (definitions.SANDBOXES_WAITING, (), 1),
        (definitions.SANDBOX_STARTS, ("started",), 1230),
        (definitions.SANDBOX_STARTS, ("failed",), 1),
        (definitions.SANDBOXES_LOST, (), lost),
        (definitions.SANDBOX_REMOVALS, ("removed",), 1226),
        (definitions.SANDBOX_REMOVALS, ("failed",), 2),
    ]
    meters = Meters([(metric, labels) for metric, labels, _ in counted])
    rollouts.environment("tasks").meters.watch(meters)
    for metric, labels, count in counted:
        meters.add(metric, *labels, by=count)
    rollouts.flush()
    return generate_latest(rollouts.registry).decode()


def test_sandboxes_have_a_table_of_their_own() -> None:
    now = JobSample(job(), 1.0, {"a": counts_of(worker_page(lost=3)), "b": counts_of(worker_page(lost=0))})
    without = JobSample(job(), 1.0, {"a": counts_of(metrics(7, 70, 5))})
    rows = [row_of(now, None), row_of(without, None)]
    assert rows[0].sandboxes == SandboxCounts(in_use=4, waiting=2, started=2460, failed=2, lost=3, left=4)
    assert rows[1].sandboxes is None
    assert rendered(rows, ["a note"], NAMESPACE)[3:] == [
        "",
        "SANDBOXES OF IN USE WAITING STARTED NOT STARTED LOST LEFT",
        "puzzle 4 2 2,460 2 3 4",
        "a note",
    ]
    assert rendered(rows[:1], [], None)[4].startswith(f"{NAMESPACE}/puzzle 4 2 2,460")


def job(seconds: float = 0, phase: str = "Running", **progress: Any) -> Object:
    told = {"completed": 3, "trajectories": 8, "failed": 1, "lastUpdated": stamp(seconds), **progress}
    return {**manifest(), "status": {"phase": phase, "progress": told}}


def test_rates_are_those_of_pods_that_were_there_both_times() -> None:
    before = JobSample(
        job(), 100.0, {"a": PodCounts(10, 100, 4), "b": PodCounts(50, 500, 4), "gone": PodCounts(9, 9, 9)}
    )
    # One began anew, and another has come.
    now = JobSample(
        job(), 102.0, {"a": PodCounts(30, 300, 5), "b": PodCounts(2, 20, 3), "new": PodCounts(1000, 1000, 2)}
    )
    row = row_of(now, before)
    assert (row.turns_per_second, row.tokens_per_second, row.in_flight) == (10.0, 100.0, 10)
    assert (row.progress, row.failed) == ("3/8", 1)


def test_rates_of_the_status_are_those_between_two_writings() -> None:
    before = JobSample(job(0, turns=10, generatedTokens=100), 100.0)
    row = row_of(JobSample(job(20, turns=50, generatedTokens=300), 103.0), before)
    assert (row.turns_per_second, row.tokens_per_second, row.in_flight) == (2.0, 10.0, None)
    same = row_of(JobSample(job(0, turns=10), 103.0), before)
    assert same.turns_per_second is None


def test_what_does_not_run_has_no_rate() -> None:
    before, now = (
        JobSample(job(), 1.0, {"a": PodCounts(1, 1, 1)}),
        JobSample(job(5, "Finishing"), 2.0, {"a": PodCounts(2, 2, 0)}),
    )
    assert row_of(now, before).turns_per_second is None
    new = row_of(JobSample(manifest(), 1.0), None)
    assert (new.phase, new.progress, new.failed, new.mean_reward) == ("-", "-", None, None)


def worker(name: str, shard: int, ready: bool = True) -> Object:
    labels = names.labels("puzzle", names.WORKERS)
    conditions = [{"type": "Ready", "status": str(ready)}]
    metadata = {"name": name, "namespace": NAMESPACE, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}, "status": {"conditions": conditions}}


PAGE = ("w:9464", "metrics")


async def test_workers_are_asked_through_the_api_server(tmp_path: Path) -> None:
    emulator = Emulator()
    emulator.put(job())
    emulator.put(worker("w", 0))
    emulator.put(worker("silent", 1))
    emulator.put(worker("starts", 2, ready=False))
    emulator.pages[PAGE] = metrics(10, 100, 4)
    async with emulator.connected(tmp_path) as connection:
        jobs = JobSampler(connection, None)
        (first,) = await jobs.sample()
        emulator.pages[PAGE] = metrics(20, 300, 6)
        (second,) = await jobs.sample()
    assert (first.turns_per_second, first.in_flight) == (None, 4)
    assert second.turns_per_second is not None
    assert second.tokens_per_second == pytest.approx(20 * second.turns_per_second)
    assert second.in_flight == 6
    assert jobs.notes == ["1 of 2 workers do not answer through the API server"]


async def test_jobs_whose_workers_the_api_server_does_not_reach_are_named(tmp_path: Path) -> None:
    """As where NetworkPolicies are enforced: the API server is no pod that they let in."""
    emulator = Emulator()
    emulator.put(job(0, turns=10, generatedTokens=100))
    emulator.put(worker("behind", 0))
    async with emulator.connected(tmp_path) as connection:
        for namespace, told in ((NAMESPACE, "puzzle"), (None, f"{NAMESPACE}/puzzle")):
            emulator.put(job(0, turns=10, generatedTokens=100))
            jobs = JobSampler(connection, namespace)
            (first,) = await jobs.sample()
            assert first.turns_per_second is None
            assert jobs.by_status == [(NAMESPACE, "puzzle")]
            emulator.put(job(10, turns=60, generatedTokens=1100))
            (row,) = await jobs.sample()
            assert (row.turns_per_second, row.tokens_per_second, row.in_flight) == (5.0, 100.0, None)
            assert jobs.notes[0] == "1 of 1 workers do not answer through the API server"
            assert jobs.notes[1].startswith(f"rates of {told} come from the status")
    emulator.put(job(20, "Finishing"))
    async with emulator.connected(tmp_path) as connection:
        await (done := JobSampler(connection, None)).sample()
        assert (done.by_status, done.notes) == ([], [])


@pytest.mark.parametrize("what", ["proxy", "pods"])
async def test_without_the_right_the_status_is_shown_and_the_right_is_named(what: str, tmp_path: Path) -> None:
    emulator = Emulator()
    emulator.put(job(0, turns=10))
    emulator.put(worker("w", 0))
    resource = "pods/proxy" if what == "proxy" else "pods"
    verb = "get" if what == "proxy" else "list"
    message = f'User "jane" cannot {verb} resource "{resource}" in API group "" in the namespace "rollouts"'
    body = {"reason": "Forbidden", "message": message}
    emulator.faults.append(
        Fault(
            lambda request: request.plural == "pods" and (what == "pods" or "/proxy/" in request.path),
            403,
            body,
            times=None,
        )
    )
    async with emulator.connected(tmp_path) as connection:
        jobs = JobSampler(connection, NAMESPACE)
        await jobs.sample()
        emulator.put(job(10, turns=60))
        (row,) = await jobs.sample()
        asked = len(emulator.requests)
        (again,) = await jobs.sample()
        # What is refused once is not asked for again; the rate stays until the status is written anew.
        assert len(emulator.requests) == asked + 1
    assert row.turns_per_second == again.turns_per_second == 5.0
    (note,) = jobs.notes
    assert "rates come from the status" in note
    assert f"may not {verb} {resource}" in note


def rendered(rows: list[JobRow], notes: list[str], namespace: str | None) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=200).print(page(rows, notes, namespace))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_the_table() -> None:
    row = JobRow("ns", "first", "Running", "3/8", 41.26, 12345.6, 0.12214, 128, 0, 3725)
    waiting = JobRow("ns", "second", "Starting", "-", None, None, None, None, None, None)
    assert rendered([row, waiting], ["a note"], None) == [
        "NAMESPACE NAME PHASE PROGRESS TURNS/S TOKENS/S REWARD IN FLIGHT FAILED ETA",
        "ns first Running 3/8 41.3 12,346 0.1221 128 0 1:02:05",
        "ns second Starting - - - - - - -",
        "a note",
    ]
    assert rendered([row], [], "ns")[0].startswith("NAME PHASE")
    assert rendered([], [], "ns") == ["There is no RolloutJob in namespace ns."]


STUCK = {
    "type": "GenerationReady",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu;\nwait until nvidia.com/gpu is free",
}


def test_what_a_job_waits_for_is_a_line_of_the_terminal_s_width_below_the_table() -> None:
    stuck = {**manifest(), "status": {"phase": "Starting", "conditions": [STUCK]}}
    row = row_of(JobSample(stuck, 1.0), None)
    told = "puzzle: Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu; wait until nvidia.com/gpu is"
    assert rendered([row], ["a note"], NAMESPACE)[2:] == ["", f"{told} free", "a note"]
    assert rendered([row], [], None)[3].startswith(f"{NAMESPACE}/puzzle: Unschedulable: 0/3")
    out = io.StringIO()
    Console(file=out, width=60).print(page([row], [], NAMESPACE))
    [line] = [line for line in out.getvalue().splitlines() if "Unschedulable" in line]
    assert line.rstrip() == "puzzle: Unschedulable: 0/3 nodes are available: 3 Insuffici…"


@pytest.mark.parametrize(
    ("conditions", "told"),
    [
        ([{"type": "GenerationReady", "status": "True"}, {"type": "WorkersReady", "status": "True"}], ""),
        ([{"type": "Complete", "status": "True", "reason": "TrajectoriesDone"}], ""),
        ([{"type": "Failed", "status": "True", "reason": "Refused", "message": "why"}], "Refused: why"),
        ([{"type": "Suspended", "status": "True", "reason": "JobSuspended"}], ""),
        ([{"type": "WorkersChecked", "status": "False", "reason": "Checking", "message": "x"}], "Checking: x"),
        ([], ""),
    ],
)
def test_a_job_that_goes_on_or_is_complete_waits_for_nothing(conditions: list[Object], told: str) -> None:
    assert row_of(JobSample({**manifest(), "status": {"conditions": conditions}}, 1.0), None).waiting == told


@pytest.mark.slow
async def test_once_prints_the_table(tmp_path: Path) -> None:
    emulator = Emulator()
    emulator.put(job(phase="Succeeded"))
    async with emulator.running(tmp_path) as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from kuberoll_api.cli import main; main()"),
            *("top", "-n", NAMESPACE, "--once"),
            env={**os.environ, "KUBECONFIG": str(file)},
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
    assert process.returncode == 0
    header, line = out.decode().splitlines()
    assert header.split()[:2] == ["NAME", "PHASE"]
    assert line.split()[:3] == ["puzzle", "Succeeded", "3/8"]
