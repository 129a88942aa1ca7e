"""Who a job's workers are, and what the job may have."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator.broker.jobs import KEPT_SECONDS, Jobs, UnknownWorker, UnusableJob
from kuberoll_operator.kube.errors import ApiError
from kuberoll_operator.kube.resources import ROLLOUT_JOBS, Resource
from kuberoll_operator.model import Key, Object
from kuberoll_operator.sandbox_pod import PodContext
from tests.operator.broker.memory import lost, refused
from tests.operator.broker.support import manifest
from tests.operator.support import NAMESPACE, condition

KEY = Key(NAMESPACE, "tasks")


class Reader:
    """Reads jobs from memory, and a clock."""

    def __init__(self) -> None:
        self.jobs: dict[tuple[str, str], Object] = {}
        self.asked: list[tuple[str, str]] = []
        self.error: ApiError | None = None
        self.now = 1000.0

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        assert resource == ROLLOUT_JOBS
        self.asked.append((namespace, name))
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return self.jobs.get((namespace, name))

    def put(self, uid: str = "one", name: str = "tasks", **changes: Any) -> None:
        job = manifest(name)
        job["metadata"]["uid"] = uid
        self.jobs[NAMESPACE, name] = {**job, **changes}


def jobs_of(reader: Reader, **options: Any) -> Jobs:
    def context(job: RolloutJob, uid: str, namespace: str) -> PodContext:
        return PodContext(job=job, uid=uid, namespace=namespace, worker_image="worker")

    return Jobs(reader, lambda uid: f"token of {uid}", context, clock=lambda: reader.now, **options)  # type: ignore[arg-type]


async def test_a_worker_is_known_by_the_token_of_its_job() -> None:
    reader = Reader()
    reader.put()
    jobs = jobs_of(reader)
    raw = await jobs.find(KEY, "token of one")
    assert jobs.usable(raw).uid == "one"
    await jobs.find(KEY, "token of one")
    assert len(reader.asked) == 1
    for key, token in (
        (KEY, "token of two"),
        (KEY, ""),
        (KEY, "ü\udcff"),
        (Key(NAMESPACE, "other"), "token of one"),
        (Key("other", "tasks"), "token of one"),
    ):
        with pytest.raises(UnknownWorker, match="there is no such job, or the token is not its own"):
            await jobs.find(key, token)


async def test_another_job_of_the_same_name_has_another_token() -> None:
    reader = Reader()
    reader.put()
    jobs = jobs_of(reader)
    await jobs.find(KEY, "token of one")
    reader.put("two")
    reader.now += 2
    assert (await jobs.find(KEY, "token of two"))["metadata"]["uid"] == "two"
    with pytest.raises(UnknownWorker):
        await jobs.find(KEY, "token of one")
    del reader.jobs[NAMESPACE, "tasks"]
    reader.now += KEPT_SECONDS + 1
    with pytest.raises(UnknownWorker):
        await jobs.find(KEY, "token of two")


async def test_who_guesses_tokens_does_not_ask_the_api_server_each_time() -> None:
    reader = Reader()
    reader.put()
    jobs = jobs_of(reader)
    for number in range(100):
        with pytest.raises(UnknownWorker):
            await jobs.find(KEY, f"guess {number}")
        with pytest.raises(UnknownWorker):
            await jobs.find(Key(NAMESPACE, "none"), f"guess {number}")
    assert len(reader.asked) == 2


async def test_many_who_ask_at_once_wait_for_one_answer() -> None:
    reader = Reader()
    reader.put()
    jobs = jobs_of(reader)
    await asyncio.gather(*(jobs.find(KEY, "token of one") for _ in range(100)))
    assert len(reader.asked) == 1
    reader.error = lost()
    reader.now += KEPT_SECONDS + 1
    await asyncio.gather(*(jobs.find(KEY, "token of one") for _ in range(100)))
    assert len(reader.asked) == 2


@pytest.mark.parametrize("error", [lost(), refused(429), refused(500), refused(401), refused(403)])
async def test_workers_are_known_while_the_api_server_does_not_answer(error: ApiError) -> None:
    """Their sandboxes run meanwhile; were they refused, all would be removed when it is there again."""
    reader = Reader()
    reader.put()
    jobs = jobs_of(reader)
    await jobs.find(KEY, "token of one")
    reader.error = error
    for _ in range(100):
        reader.now += 60
        await jobs.find(KEY, "token of one")
    with pytest.raises(UnknownWorker):
        await jobs.find(KEY, "token of two")
    # Of whom nothing is known is not told that there is no such job.
    for _ in range(2):
        with pytest.raises(type(error)):
            await jobs.find(Key(NAMESPACE, "other"), "token of one")
    reader.error = None
    del reader.jobs[NAMESPACE, "tasks"]
    reader.now += KEPT_SECONDS + 1
    with pytest.raises(UnknownWorker):
        await jobs.find(KEY, "token of one")


async def test_one_who_gives_up_waiting_takes_the_answer_from_nobody() -> None:
    reader = Reader()
    reader.put()
    jobs = jobs_of(reader)
    first, second = (asyncio.create_task(jobs.find(KEY, "token of one")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second)["metadata"]["uid"] == "one"


async def test_only_the_given_namespaces_have_jobs() -> None:
    reader = Reader()
    reader.put()
    with pytest.raises(UnknownWorker):
        await jobs_of(reader, namespaces=("other",)).find(KEY, "token of one")
    assert not reader.asked
    await jobs_of(reader, namespaces=("other", NAMESPACE)).find(KEY, "token of one")


@pytest.mark.parametrize(
    "name", ["../tasks", "tasks/status", "tasks?x=", "tasks#", "..", ".", "", "TASKS", "a" * 300, "a\n"]
)
async def test_what_is_no_name_is_asked_of_nobody(name: str) -> None:
    reader = Reader()
    reader.put()
    for key in (Key(NAMESPACE, name), Key(name, "tasks")):
        with pytest.raises(UnknownWorker):
            await jobs_of(reader).find(key, "token of one")
    assert not reader.asked


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": {"conditions": [condition("Complete", True, "Done")]}}, "the job is over"),
        ({"status": {"conditions": [condition("Failed", True, "Done")]}}, "the job is over"),
        ({"spec": {**manifest()["spec"], "suspend": True}}, "the job is suspended"),
        ({"spec": {"generation": 7}}, "the job is invalid"),
        ({"spec": {}}, "the job is invalid"),
        (
            {"metadata": {"name": "tasks", "namespace": NAMESPACE, "uid": "one", "deletionTimestamp": "x"}},
            "the job is being deleted",
        ),
    ],
)
async def test_a_job_that_may_have_none_says_why(changes: dict[str, Any], words: str) -> None:
    reader = Reader()
    reader.put(**changes)
    jobs = jobs_of(reader)
    raw = await jobs.find(KEY, "token of one")
    with pytest.raises(UnusableJob, match=words):
        jobs.usable(raw)


async def test_a_job_that_is_not_over_may_have_some() -> None:
    reader = Reader()
    reader.put(status={"conditions": [condition("Complete", False, "Running")]})
    jobs = jobs_of(reader)
    found = jobs.usable(await jobs.find(KEY, "token of one"))
    assert (found.key, found.worker_image) == (KEY, "worker")
