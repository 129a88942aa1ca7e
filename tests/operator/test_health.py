"""Health, readiness, metrics and progress: what is said is what is so."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kuberoll_api import conditions
from kuberoll_api.contract import MOST_UNANSWERING, PodProgress
from kuberoll_api.http_server import serving
from kuberoll_operator.cache import trim
from kuberoll_operator.health import QUEUE_SECONDS, WATCH_SECONDS, Health, routes
from kuberoll_operator.kube.resources import ROLLOUT_JOBS
from kuberoll_operator.metrics import Metrics, milestones, scaling
from kuberoll_operator.model import Key, Object, PodReports, ServedWeights
from kuberoll_operator.polling import ANSWER_BYTES, FIRST_SECONDS, MISSED_POLLS, ReportPoller
from tests.operator.support import START, condition, raw

KEY = Key("rollouts", "puzzle")
RAW = raw()


class State:
    """What the parts of an operator say; well unless a test says otherwise."""

    def __init__(self) -> None:
        self.watch, self.unsynced, self.queue = (1.0, "pods"), list[str](), 0.0
        self.leading, self.lease_attempt_age = True, 1.0

    def health(self) -> Health:
        return Health(
            watch=lambda: self.watch,
            unsynced=lambda: self.unsynced,
            queue=lambda: self.queue,
            leading=lambda: self.leading,
            lease_attempt_age=lambda: self.lease_attempt_age,
            lease_seconds=15,
        )


async def answers(state: State, path: str) -> tuple[int, str]:
    """Over HTTP."""
    async with (
        serving(routes(state.health(), Metrics().registry), host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}") as answer,
    ):
        return answer.status, await answer.text()


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_an_operator_that_is_well_says_so(path: str) -> None:
    assert await answers(State(), path) == (200, "ok")


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"watch": (WATCH_SECONDS + 1, "jobs")}, "/healthz", "no activity of jobs"),
        ({"queue": QUEUE_SECONDS + 1}, "/healthz", "a job has waited"),
        ({"lease_attempt_age": 31.0}, "/healthz", "lease"),
        ({"lease_attempt_age": 31.0}, "/readyz", "lease"),
        ({"unsynced": ["jobs", "pods"]}, "/readyz", "not yet listed completely: jobs, pods"),
    ],
)
async def test_what_is_wrong_is_named(change: dict[str, Any], path: str, words: str) -> None:
    state = State()
    vars(state).update(change)
    status, text = await answers(state, path)
    assert status == 503
    assert words in text


async def test_who_stands_by_may_have_a_long_queue_and_no_lease() -> None:
    state = State()
    state.leading, state.queue = False, 1e6
    assert (await answers(state, "/healthz"))[0] == 200


async def test_an_unsynced_operator_lives() -> None:
    state = State()
    state.unsynced = ["pods"]
    assert (await answers(state, "/healthz"))[0] == 200


async def test_metrics_are_shown() -> None:
    metrics = Metrics()
    phases = ["Running", "Running", None]
    jobs = [(Key("n", str(number)), {"status": {"phase": phase}}) for number, phase in enumerate(phases)]
    metrics.watch(
        jobs=lambda: jobs, depth=lambda: 3, oldest=lambda: 2.5, leading=lambda: True, cached=lambda: {"Pod": 9}
    )
    metrics.record_reconcile("success", 0.02)
    metrics.record_error("Forbidden")
    metrics.record_request("patch", "Deployment", 200)
    new = {"conditions": [condition(conditions.GENERATION_READY, True, "Ready")]}
    created = raw(creationTimestamp=START.strftime("%Y-%m-%dT%H:%M:%SZ"))
    metrics.record_status(created, {}, new, START + timedelta(seconds=42))
    value = metrics.registry.get_sample_value
    assert value("kuberoll_operator_jobs", {"phase": "Running"}) == 2
    assert value("kuberoll_operator_jobs", {"phase": "Pending"}) == 1
    assert value("kuberoll_operator_jobs", {"phase": "Failed"}) == 0
    assert value("kuberoll_operator_queue_depth") == 3
    assert value("kuberoll_operator_queue_oldest_seconds") == 2.5
    assert value("kuberoll_operator_leader") == 1
    assert value("kuberoll_operator_cached_objects", {"kind": "Pod"}) == 9
    assert value("kuberoll_operator_reconciles_total", {"result": "success"}) == 1
    assert value("kuberoll_operator_errors_total", {"reason": "Forbidden"}) == 1
    assert value("kuberoll_operator_api_requests_total", {"verb": "patch", "kind": "Deployment", "code": "200"}) == 1
    assert value("kuberoll_operator_milestone_seconds_sum", {"milestone": "generation_ready"}) == 42


def test_jobs_that_wait_for_a_problem_are_counted_while_they_do() -> None:
    """From what the cache keeps of a job, with the reason of kubectl's column."""
    ready = condition(conditions.GENERATION_READY, True, "Ready", "2 of 2")
    statuses = {
        "stuck": [condition(conditions.GENERATION_READY, False, "Unschedulable", "0/3 nodes")],
        "silent": [
            condition(conditions.GENERATION_READY, False, "NotAnswering", "no replica answers"),
            condition(conditions.WORKERS_READY, True, "Running"),
        ],
        "starting": [condition(conditions.GENERATION_READY, False, "Starting", "0 of 2")],
        "running": [ready, condition(conditions.WORKERS_READY, True, "Running")],
        "failed": [ready, condition(conditions.FAILED, True, "Refused")],
    }
    live = {name: raw({"phase": "Running", "conditions": found}, name=name) for name, found in statuses.items()}
    metrics = Metrics()
    jobs = lambda: [(Key("rollouts", name), trim(ROLLOUT_JOBS, item)) for name, item in live.items()]  # noqa: E731
    metrics.watch(jobs=jobs, depth=lambda: 0, oldest=lambda: 0.0, leading=lambda: True, cached=dict)

    def waiting() -> set[tuple[str, ...]]:
        [found] = [item for item in metrics.registry.collect() if item.name == "kuberoll_operator_waiting_jobs"]
        assert all(sample.value == 1 for sample in found.samples)
        return {(item.labels["rolloutjob"], item.labels["condition"], item.labels["reason"]) for item in found.samples}

    assert waiting() == {
        ("stuck", "GenerationReady", "Unschedulable"),
        ("silent", "GenerationReady", "NotAnswering"),
    }
    live["stuck"] = live["running"]
    assert waiting() == {("silent", "GenerationReady", "NotAnswering")}
    assert "0/3 nodes" not in str(trim(ROLLOUT_JOBS, raw({"conditions": statuses["stuck"]})))


def test_milestones_are_come_to_once() -> None:
    ready = condition(conditions.GENERATION_READY, True, "Ready")
    begun = {"conditions": [ready], "progress": {"completed": 0, "failed": 0}}
    going = {"conditions": [ready], "progress": {"completed": 3, "failed": 0}}
    done = {"conditions": [condition(conditions.COMPLETE, True, "Done")], "progress": {"completed": 8, "failed": 0}}
    assert milestones({}, begun) == ["generation_ready"]
    assert milestones(begun, going) == ["first_trajectory"]
    assert milestones(going, done) == ["complete"]
    assert milestones(done, done) == []
    resumed = {"conditions": [condition(conditions.SUSPENDED, False, "JobResumed"), ready]}
    assert milestones({}, resumed) == []


def worker(shard: int, host: str = "127.0.0.1", uid: str = "", ready: str = "True") -> Object:
    """A worker pod."""
    labels = {"app.kubernetes.io/component": "workers"}
    annotations = {"batch.kubernetes.io/job-completion-index": str(shard)}
    metadata = {"name": f"w-{shard}", "uid": uid or str(shard), "labels": labels, "annotations": annotations}
    status = {"phase": "Running", "podIP": host, "conditions": [{"type": "Ready", "status": ready}]}
    return {"metadata": metadata, "status": status}


class Pauses:
    """The time between polls, which passes when a test says so."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[float] = asyncio.Queue()
        self._over: asyncio.Queue[None] = asyncio.Queue()

    async def sleep(self, seconds: float) -> None:
        self.started.put_nowait(seconds)
        await self._over.get()

    async def end(self) -> float:
        """Ends the next pause, when it has begun; its length."""
        seconds = await self.started.get()
        self.over()
        return seconds

    def over(self) -> None:
        """Ends the pause that has begun."""
        self._over.put_nowait(None)


class Pods:
    """A poller and the pod that it asks."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[Key] = asyncio.Queue()
        self.answer: Any = {"shard": 0, "trajectories": 5, "turns": 20, "reward_sum": 2.5, "planned": 16, "new": 1}
        self.asked = asyncio.Queue[None]()
        self.pauses = Pauses()

    @asynccontextmanager
    async def poller(self) -> AsyncIterator[ReportPoller]:
        async def progress(_: web.Request) -> web.Response:
            self.asked.put_nowait(None)
            if isinstance(self.answer, bytes):
                return web.Response(body=self.answer)
            return web.json_response(self.answer)

        async with serving([web.get("/progress", progress)], host="127.0.0.1", port=0) as port:  # noqa: SIM117
            async with ReportPoller(self.told.put_nowait, seconds=15, sleep=self.pauses.sleep, port=port) as poller:
                yield poller


async def test_pods_are_asked_in_the_background_whether_or_not_anybody_looks() -> None:
    pods = Pods()
    async with pods.poller() as poller:
        assert poller.latest(KEY, RAW, [worker(3)]) == PodReports()
        assert await pods.told.get() == KEY
        expected = PodProgress(shard=3, trajectories=5, turns=20, reward_sum=2.5, planned=16)
        assert poller.latest(KEY, RAW, [worker(3)]).progress == {3: expected}
        assert pods.asked.qsize() == 1
        pods.answer = {"shard": 3, "trajectories": 6, "turns": 24}
        assert await pods.pauses.end() == 15
        await pods.told.get()
        assert poller.latest(KEY, RAW, [worker(3)]).progress[3].trajectories == 6
        # The same again is no news.
        assert await pods.pauses.end() == 15
        assert await pods.pauses.started.get() == 15
        assert pods.told.empty()
        # Gone with the pod, but for what is counted.
        later = poller.latest(KEY, RAW, [])
        assert (later.progress, later.counted[3].trajectories) == ({}, 6)


async def test_a_worker_that_has_just_started_is_asked_again_soon() -> None:
    pods = Pods()
    pods.answer = {"shard": 3, "planned": 16}
    async with pods.poller() as poller:
        poller.latest(KEY, RAW, [worker(3)])
        assert await pods.told.get() == KEY
        pods.answer = {"shard": 3, "planned": 16, "turns": 1}
        assert await pods.pauses.end() == FIRST_SECONDS
        assert await pods.pauses.started.get() == 15


async def test_what_a_shard_has_counted_stays_until_its_next_pod_has_counted_as_much() -> None:
    pods = Pods()
    async with pods.poller() as poller:
        poller.latest(KEY, RAW, [worker(3)])
        await pods.told.get()
        for answer, counted in (
            # A successor that has not read yet what is stored, and one that has; failed ones are tried again.
            ({"shard": 3}, 5),
            ({"shard": 3, "trajectories": 5, "failed": 1, "planned": 16}, 5),
            ({"shard": 3, "trajectories": 5, "planned": 16}, 5),
            ({"shard": 3, "trajectories": 9, "planned": 16}, 9),
        ):
            pods.answer = answer
            poller.latest(KEY, RAW, [worker(3, uid="next")])
            await pods.pauses.end()
            await pods.told.get()
            found = poller.latest(KEY, RAW, [worker(3, uid="next")])
            assert found.counted[3].trajectories == counted
            if "planned" in answer:
                assert found.counted == found.progress
        poller.forget(KEY)
        assert poller.latest(KEY, RAW, []) == PodReports()


async def test_what_a_worker_says_of_others_counts_while_it_answers() -> None:
    pods = Pods()
    silent = {"url": "http://10.0.0.2:8000", "since": "2026-11-27T12:03:11Z", "requests": 7, "new": 1}
    pods.answer = {"shard": 3, "turns": 1, "trajectories": 5, "answering": 1, "unanswering": [silent]}
    async with pods.poller() as poller:
        poller.latest(KEY, RAW, [worker(3)])
        await pods.told.get()
        [server] = poller.latest(KEY, RAW, [worker(3)]).progress[3].unanswering
        assert (server.url, server.requests) == ("http://10.0.0.2:8000", 7)
        pods.answer = b"no answer"
        for _ in range(MISSED_POLLS - 1):
            await pods.pauses.end()
            await pods.asked.get()
        await pods.pauses.started.get()
        assert poller.latest(KEY, RAW, [worker(3)]).progress[3].unanswering
        pods.pauses.over()
        # That is news, though nobody answers.
        await pods.told.get()
        found = poller.latest(KEY, RAW, [worker(3)]).progress[3]
        assert (found.answering, found.unanswering, found.trajectories) == (None, (), 5)


async def test_a_worker_that_is_not_ready_says_nothing_of_others() -> None:
    pods = Pods()
    pods.answer = {"shard": 3, "turns": 1, "answering": 1, "unanswering": []}
    async with pods.poller() as poller:
        poller.latest(KEY, RAW, [worker(3)])
        await pods.told.get()
        assert poller.latest(KEY, RAW, [worker(3)]).progress[3].answering == 1
        assert poller.latest(KEY, RAW, [worker(3, ready="False")]).progress[3].answering is None


async def test_nobody_is_asked_when_there_is_nobody_left() -> None:
    pods = Pods()
    async with pods.poller() as poller:
        poller.latest(KEY, RAW, [worker(3)])
        await pods.told.get()
        poller.latest(KEY, RAW, [])
        [task] = poller._tasks.values()
        await pods.pauses.end()
        await task
        assert not poller._tasks
        assert pods.asked.qsize() == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"no json",
        b"{" + b" " * ANSWER_BYTES + b"}",
        {"shard": 0, "trajectories": -1},
        {"shard": 0, "turns": 1e300},
        {"shard": 0, "unanswering": [{"url": "u", "since": "12:00"}]},
        {"shard": 0, "unanswering": [{"url": "u", "since": "2026-11-27T12:03:11Z"}] * (MOST_UNANSWERING + 1)},
        b'{"shard": 0, "reward_sum": NaN}',
        {},
    ],
    ids=["text", "too much", "negative", "too many", "no time", "too many servers", "not a number", "no shard"],
)
async def test_what_cannot_be_believed_is_not(answer: Any) -> None:
    pods = Pods()
    pods.answer = answer
    async with pods.poller() as poller:
        poller.latest(KEY, RAW, [worker(0)])
        await pods.pauses.started.get()
        assert pods.asked.qsize() == 1
        assert pods.told.empty()
        assert poller.latest(KEY, RAW, [worker(0)]) == PodReports()


async def test_who_does_not_answer_is_left_out() -> None:
    pods = Pods()
    async with pods.poller() as poller:
        with socket.socket() as silent:
            silent.bind(("127.0.0.2", poller._port))
            # Bound and not listening: refused.
            poller.latest(KEY, RAW, [worker(0), worker(1, host="127.0.0.2")])
            await pods.told.get()
            assert set(poller.latest(KEY, RAW, [worker(0), worker(1, host="127.0.0.2")]).progress) == {0}


async def test_only_ready_pods_are_asked() -> None:
    pods = Pods()
    async with pods.poller() as poller:
        going = worker(1)
        going["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
        assert poller.latest(KEY, RAW, [worker(0, ready="False"), going]) == PodReports()
        assert not poller._tasks


async def test_forgotten_jobs_are_not_told_of() -> None:
    pods = Pods()
    async with pods.poller() as poller:
        poller.latest(KEY, RAW, [worker(0)])
        [task] = poller._tasks.values()
        poller.forget(KEY)
        await task
        assert pods.told.empty()


def engine(uid: str, host: str = "127.0.0.1") -> Object:
    """A generation pod."""
    labels = {"app.kubernetes.io/component": "generation"}
    status = {"phase": "Running", "podIP": host, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": f"g-{uid}", "uid": uid, "labels": labels}, "status": status}


class Replicas:
    """Who tells of weights: pods at /weights, Serve's app at /v1/weights."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[Key] = asyncio.Queue()
        self.answers: dict[str, Any] = {}
        self.shown: list[str | None] = []
        self.pauses = Pauses()

    @asynccontextmanager
    async def poller(self) -> AsyncIterator[tuple[ReportPoller, int]]:
        async def answer(request: web.Request) -> web.Response:
            self.shown.append(request.headers.get("authorization"))
            return web.json_response(self.answers[request.path])

        routes = [web.get("/weights", answer), web.get("/v1/weights", answer)]
        async with (
            serving(routes, host="127.0.0.1", port=0) as port,
            ReportPoller(
                self.told.put_nowait,
                seconds=15,
                sleep=self.pauses.sleep,
                weights_port=port,
                token=lambda uid: f"of-{uid}",
            ) as poller,
        ):
            yield poller, port


async def test_pods_of_native_tell_of_their_weights() -> None:
    replicas = Replicas()
    job = raw({"generation": {"backend": "Native"}})
    async with replicas.poller() as (poller, _):
        replicas.answers["/weights"] = {"wanted": "2", "served": "1", "problem": "not there yet", "more": 1}
        assert poller.latest(KEY, job, [engine("a")]) == PodReports()
        assert await replicas.told.get() == KEY
        assert poller.latest(KEY, job, [engine("a")]).served == {"a": ServedWeights("1", "not there yet")}
        replicas.answers["/weights"] = {"wanted": "2", "served": "2", "problem": None}
        await replicas.pauses.end()
        await replicas.told.get()
        assert poller.latest(KEY, job, [engine("a")]).served == {"a": ServedWeights("2")}
        assert poller.latest(KEY, job, [engine("b")]).served == {}
        # It is for anybody to read, and nobody is shown what is for the policy alone.
        assert set(replicas.shown) == {None}


async def test_serve_tells_of_the_weights_of_its_replicas() -> None:
    replicas = Replicas()
    async with replicas.poller() as (poller, port):
        generation = {"backend": "KubeRay", "endpoint": f"http://127.0.0.1:{port}"}
        ready = condition(conditions.GENERATION_READY, True, "Ready")
        assert poller.latest(KEY, raw({"generation": generation}), [engine("a")]) == PodReports()
        assert not poller._tasks
        job = raw({"generation": generation, "conditions": [ready]})
        replicas.answers["/v1/weights"] = {
            "wanted": "2",
            "replicas": {"x": "2", "y": "1"},
            "problems": {"y": "no file"},
        }
        poller.latest(KEY, job, [])
        await replicas.told.get()
        assert poller.latest(KEY, job, []).served == {"x": ServedWeights("2"), "y": ServedWeights("1", "no file")}
        replicas.answers["/v1/weights"] = {"replicas": {"z": "2"}}
        await replicas.pauses.end()
        await replicas.told.get()
        assert poller.latest(KEY, job, []).served == {"z": ServedWeights("2")}
        assert set(replicas.shown) == {f"Bearer of-{job['metadata']['uid']}"}


def test_scalings_are_between_the_first_replicas_and_the_release_of_the_last() -> None:
    def of(count: int) -> dict[str, Any]:
        return {"generation": {"desiredReplicas": count}}

    assert [scaling(of(old), of(new)) for old, new in ((0, 2), (2, 5), (5, 3), (3, 3), (3, 0))] == [
        None,
        "up",
        "down",
        None,
        None,
    ]
    assert scaling({}, of(1)) is None
