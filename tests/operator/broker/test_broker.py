"""Leases of sandboxes' pods, in virtual time: what workers, the API server, kubelets and clocks may do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from kuberoll_api.sandboxes import SandboxAnswer
from kuberoll_operator.broker.broker import SWEEP_SECONDS, Broker
from kuberoll_operator.model import Key, Object
from kuberoll_operator.sandbox_pod import build_pod
from tests.operator.broker.memory import Answer, Server, broker_of, lost, refused
from tests.operator.broker.support import WORKER, context, request
from tests.operator.emulator import in_virtual_time
from tests.operator.support import NAMESPACE

JOB = Key(NAMESPACE, "tasks")
PLACE = (NAMESPACE, "tasks-sb-1")
WAIT = 20.0


class World:
    """A broker that sweeps, its API server, and a worker."""

    def __init__(self, server: Server | None = None, **options: Any) -> None:
        self.server = server or Server()
        self.options = options
        self.broker = broker_of(self.server, **options)
        self._tasks = [asyncio.create_task(self.broker.run())]

    def ask(self, name: str = "sb-1", *, seconds: float = WAIT, **fields: Any) -> Coroutine[Any, Any, SandboxAnswer]:
        return self.broker.want(name, request(**fields), context(), seconds=seconds)

    def renew(self, *names: str, worker: str = WORKER) -> None:
        self.broker.renew(JOB, worker, frozenset(names))

    async def live(self, seconds: float, *names: str) -> None:
        """Let time pass, in which the worker says what it has."""
        for _ in range(round(seconds / 10)):
            self.renew(*names)
            await asyncio.sleep(10)

    def pods(self) -> set[str]:
        """Names of pods that nobody deletes."""
        objects = self.server.objects.items()
        return {place[1] for place, pod in objects if "deletionTimestamp" not in pod["metadata"]}

    async def restart(self, *, killed: bool = False) -> None:
        """Replace the broker by another one."""
        self._tasks.pop().cancel()
        if killed:
            for lease in self.broker._leases.values():
                if lease.task is not None:
                    lease.task.cancel()
        else:
            await self.broker.close()
        self.broker = broker_of(self.server, **self.options)
        self._tasks.append(asyncio.create_task(self.broker.run()))

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.broker.close()


def played(play: Callable[[World], Awaitable[None]], server: Server | None = None, **options: Any) -> None:
    """Have a world for the time of a play."""

    async def main() -> None:
        world = World(server, **options)
        try:
            await play(world)
        finally:
            await world.end()

    in_virtual_time(main())


def test_a_sandbox_is_made_once_and_removed_once() -> None:
    async def play(world: World) -> None:
        answers = await asyncio.gather(world.ask(), world.ask(), world.ask())
        assert {(one.state, one.address) for one in answers} == {("Running", "10.1.2.3:8791")}
        assert await world.ask() == answers[0]
        await world.broker.release("sb-1", JOB)
        await asyncio.gather(*(world.broker.release("sb-1", JOB) for _ in range(3)))
        await world.live(60)
        assert world.server.asked == {"create": 1, "delete": 1}
        assert world.broker.removed == {"released": 1}
        assert not world.server.objects

    played(play)


def test_a_worker_learns_what_became_of_a_sandbox_that_it_has_lost() -> None:
    async def play(world: World) -> None:
        clock = world.server.now
        await world.ask()
        began = clock()
        assert (await world.broker.ending("sb-1", JOB, seconds=3)).state == "Running"
        assert clock() - began == pytest.approx(3)
        # Its worker knows first, as its connections break.
        asked = asyncio.create_task(world.broker.ending("sb-1", JOB, seconds=3))
        await asyncio.sleep(1)
        world.server.end(PLACE)
        found = await asked
        assert (found.state, found.event) == ("Ended", "Evicted")
        assert found.reason == "Evicted; the node was low on memory"
        assert clock() - began < 5
        # Another broker knows it from the pod.
        await world.restart()
        world.server.watched_by(world.broker)
        assert await world.broker.ending("sb-1", JOB, seconds=3) == found
        for name, job in (("sb-1", Key(NAMESPACE, "others")), ("sb-2", JOB)):
            nothing = await world.broker.ending(name, job, seconds=3)
            assert (nothing.state, nothing.reason) == ("Ended", "there is no pod of it")

    played(play)


def test_a_pod_that_is_deleted_by_others_is_no_riddle() -> None:
    async def play(world: World) -> None:
        await world.ask()
        world.server.vanish(PLACE)
        found = await world.broker.ending("sb-1", JOB, seconds=3)
        assert (found.state, found.event, found.reason) == ("Ended", "Deleted", "its pod was deleted")

    played(play)


def test_whoever_waits_is_told_why() -> None:
    async def play(world: World) -> None:
        first = await world.ask(seconds=0.001)
        assert (first.state, first.reason) == ("Waiting", "it waits for its turn to be made")
        second = await world.ask(seconds=5)
        assert (second.state, second.reason) == ("Waiting", "its pod waits for the scheduler")

    played(play, Server(start_seconds=None))


def test_what_the_job_may_not_have_is_refused_and_costs_nothing() -> None:
    async def play(world: World) -> None:
        for environment in ("none", "puzzles"):
            assert (await world.ask(environment=environment)).state == "Refused"
        assert not world.server.asked

    played(play)


def test_what_was_given_back_does_not_come_back() -> None:
    async def play(world: World) -> None:
        await world.ask()
        await world.broker.release("sb-1", JOB)
        # A request that the one before has overtaken.
        assert (await world.ask()).state == "Ended"
        # And one that was given back before it was ever asked for.
        await world.broker.release("sb-2", JOB)
        assert (await world.ask("sb-2")).state == "Ended"
        await world.live(100)
        assert world.server.asked["create"] == 1
        assert not world.server.objects

    played(play)


@pytest.mark.parametrize("after", [0.001, 0.004, 0.006, 0.009, 0.02, 0.5, 1.5])
def test_a_start_that_is_given_up_leaves_nothing(after: float) -> None:
    """At different places of its start, the request that makes the pod among them."""

    async def play(world: World) -> None:
        asking = asyncio.create_task(world.ask())
        await asyncio.sleep(after)
        await world.broker.release("sb-1", JOB)
        assert (await asking).state == ("Ended" if after < 1 else "Running")
        await asyncio.sleep(SWEEP_SECONDS + 3)
        assert not world.server.objects
        assert world.server.asked["create"] <= 1

    played(play)


def test_an_answer_that_was_lost_is_no_second_pod() -> None:
    async def play(world: World) -> None:
        world.server.faults.append(Answer(lambda verb, _: verb == "create", lost(), after=True))
        # The watch does not tell of it before the second try.
        world.server.watch_delay = 30
        answer = await world.ask(seconds=60)
        assert answer.state == "Running"
        assert [entry[1] for entry in world.server.log] == ["get"]
        assert world.server.asked == {"create": 2, "get": 1}
        await world.broker.release("sb-1", JOB)
        await asyncio.sleep(60)
        assert not world.server.objects

    played(play)


def test_what_has_its_name_and_cannot_be_read_is_asked_for_again() -> None:
    async def play(world: World) -> None:
        world.server.faults += [
            Answer(lambda verb, _: verb == "create", lost(), after=True),
            Answer(lambda verb, _: verb == "get", refused(503)),
        ]
        world.server.watch_delay = 30
        assert (await world.ask(seconds=60)).state == "Running"

    played(play)


@pytest.mark.parametrize("labels", [{}, {"app.kubernetes.io/managed-by": "kuberoll-broker"}])
def test_pods_of_others_are_neither_taken_nor_removed(labels: dict[str, str]) -> None:
    """A worker may ask for any name: its job's other pods have names that begin with the job's, too."""

    async def play(world: World) -> None:
        other: Object = {"metadata": {"namespace": NAMESPACE, "name": "tasks-workers-0", "uid": "other"}}
        other["metadata"]["labels"] = labels
        world.server.store(other)
        answer = await world.ask("workers-0")
        assert answer.state == "Refused"
        assert "another pod has this name" in answer.reason
        await world.broker.release("workers-0", JOB)
        await world.live(1000)
        assert world.pods() == {"tasks-workers-0"}
        assert not world.server.asked["delete"]

    played(play)


def test_a_pod_of_another_worker_or_job_is_refused() -> None:
    async def play(world: World) -> None:
        await world.ask()
        assert (await world.ask(worker="another")).state == "Refused"
        other = context(uid="another-uid")
        assert (await world.broker.want("sb-1", request(), other, seconds=1)).state == "Refused"
        await world.restart()
        answer = await world.ask(worker="another")
        assert answer.state == "Refused"
        assert "another worker" in answer.reason

    played(play)


def test_a_job_whose_name_begins_another_ones_does_not_remove_its_sandboxes() -> None:
    """`a` with the sandbox `b-c`, and `a-b` with `c`, have pods of one name."""

    async def play(world: World) -> None:
        short, long = context("a"), context("a-b", uid="another-uid")
        assert (await world.broker.want("b-c", request(), short, seconds=WAIT)).state == "Running"
        assert (await world.broker.want("c", request(), long, seconds=WAIT)).state == "Refused"
        await world.broker.release("c", long.key)
        for _ in range(10):
            world.broker.renew(long.key, WORKER, frozenset())
            world.broker.renew(short.key, WORKER, frozenset({"b-c"}))
            await asyncio.sleep(10)
        assert (await world.broker.want("b-c", request(), short, seconds=WAIT)).state == "Running"
        assert world.pods() == {"a-b-c"}
        assert world.server.asked == {"create": 1}

    played(play)


def test_two_jobs_of_one_name_one_after_another() -> None:
    async def play(world: World) -> None:
        first, second = context(uid="one"), context(uid="two")
        await world.broker.want("sb-1", request(), first, seconds=WAIT)
        # The job is deleted, and its pods with it; its worker says no more.
        world.server.vanish(PLACE)
        answer = await world.broker.want("sb-2", request(worker="new"), second, seconds=WAIT)
        assert answer.state == "Running"
        for _ in range(20):
            world.renew("sb-2", worker="new")
            await asyncio.sleep(10)
        assert world.pods() == {"tasks-sb-2"}
        assert world.server.objects[NAMESPACE, "tasks-sb-2"]["metadata"]["ownerReferences"][0]["uid"] == "two"

    played(play)


# Answers of the API server.


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (refused(403, 'pods "x" is forbidden: violates PodSecurity "restricted:latest": x'), "enforce=baseline"),
        (refused(403, "pods is forbidden: User cannot create", reason="Forbidden"), "User cannot create"),
        (refused(422, "Pod is invalid: spec.tolerations", reason="Invalid"), "spec.tolerations"),
        (refused(404, 'namespaces "x" not found', reason="NotFound"), "not found"),
        (refused(400, "cannot be handled as a Pod", reason="BadRequest"), "cannot be handled"),
        (refused(413, "too large"), "too large"),
    ],
)
def test_what_will_never_be_is_refused(error: Any, words: str) -> None:
    async def play(world: World) -> None:
        world.server.faults.append(Answer(lambda verb, _: verb == "create", error))
        answer = await world.ask()
        assert answer.state == "Refused"
        assert words in answer.reason
        assert world.broker.made == {"refused": 1}

    played(play)


@pytest.mark.parametrize(
    "error",
    [
        lost(),
        refused(500, "etcdserver: request timed out"),
        refused(503),
        refused(401, "Unauthorized", reason="Unauthorized"),
        refused(409, 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified'),
        refused(410, "gone", reason="Expired"),
    ],
)
def test_what_may_be_later_is_tried_again_and_not_at_once(error: Any) -> None:
    async def play(world: World) -> None:
        world.server.faults.append(Answer(lambda verb, _: verb == "create", error, times=4))
        waiting = await world.ask(seconds=3)
        assert waiting.state == "Waiting"
        assert "the API server does not make its pod" in waiting.reason
        assert 1 < world.server.asked["create"] < 4
        assert (await world.ask(seconds=60)).state == "Running"
        assert world.server.asked["create"] == 5

    played(play)


def test_whoever_is_asked_to_wait_waits_and_so_do_all_others() -> None:
    async def play(world: World) -> None:
        slow = refused(429, "too many requests", retry_after="7")
        world.server.faults.append(Answer(lambda verb, _: verb == "create", slow))
        answers = asyncio.gather(*(world.ask(f"sb-{number}", seconds=30) for number in range(1)))
        await asyncio.sleep(0.1)
        others = asyncio.gather(*(world.ask(f"other-{number}", seconds=30) for number in range(5)))
        await asyncio.sleep(6.5)
        assert world.server.asked["create"] == 1
        assert {one.state for one in [*await answers, *await others]} == {"Running"}
        assert world.server.asked["create"] == 7

    played(play)


def test_a_mad_server_is_not_waited_for_forever() -> None:
    async def play(world: World) -> None:
        slow = refused(429, "too many requests", retry_after="1e9")
        world.server.faults.append(Answer(lambda verb, _: verb == "create", slow))
        alive = asyncio.create_task(world.live(100, "sb-1"))
        assert (await world.ask(seconds=100)).state == "Running"
        alive.cancel()

    played(play)


def test_room_in_a_quota_is_taken_at_once_by_as_many_as_there_is_room_for() -> None:
    async def play(world: World) -> None:
        names = [f"sb-{number}" for number in range(12)]
        for name in names[:4]:
            assert (await world.ask(name)).state == "Running"
        waiting = {name: asyncio.create_task(world.ask(name, seconds=5)) for name in names[4:]}
        for task in waiting.values():
            answer = await task
            assert answer.state == "Waiting"
            assert "it waits for quota" in answer.reason
            assert "pods=4" in answer.reason
        # Long enough for the pauses to be at their longest.
        for _ in range(6):
            world.renew(*names)
            await asyncio.gather(*(world.ask(name, seconds=10) for name in names[4:]))
        await world.broker.release(names[0], JOB)
        place = next(place for place in world.server.objects if place[1].endswith("-sb-0"))
        while place in world.server.objects:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
        before = world.server.asked["create"]
        await asyncio.sleep(0.5)
        assert len(world.pods()) == 4
        # Not all of the eight have tried.
        assert world.server.asked["create"] - before <= 4

    played(play, Server(quota=4))


def test_a_job_that_waits_for_quota_keeps_no_other_from_starting() -> None:
    async def play(world: World) -> None:
        full = refused(403, 'pods "x" is forbidden: exceeded quota: pods')
        world.server.faults.append(Answer(lambda _, place: place[1].startswith("full-"), full, times=1 << 30))
        stuck = [world.broker.want(f"sb-{n}", request(), context("full"), seconds=5) for n in range(4)]
        assert {one.state for one in await asyncio.gather(*stuck)} == {"Waiting"}
        assert (await world.ask()).state == "Running"

    played(play, starts=2, starts_per_job=4)


def test_what_no_node_has_room_for_keeps_no_other_from_starting() -> None:
    async def play(world: World) -> None:
        stuck = [
            asyncio.create_task(world.broker.want(f"sb-{n}", request(), context("big"), seconds=90)) for n in (1, 2)
        ]
        while len(world.server.objects) < 2:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.05)
        for place in list(world.server.objects):
            pod = world.server.objects[place]
            pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}]
            world.server.store(pod)
        assert (await world.broker.want("sb-3", request(), context("small"), seconds=60)).state == "Running"
        for place, pod in list(world.server.objects.items()):
            if place[1].startswith("big-"):
                world.server._run(place, pod["metadata"]["uid"])
        assert {(await one).state for one in stuck} == {"Running"}

    played(play, Server(start_seconds=30), starts=2, starts_per_job=4)


def test_no_more_start_at_a_time_than_may() -> None:
    async def play(world: World) -> None:
        jobs = [context("one", uid="1"), context("two", uid="2"), context("three", uid="3")]
        wanted = [(job, f"sb-{number}") for job in jobs for number in range(8)]
        asking = asyncio.gather(*(world.broker.want(name, request(), job, seconds=300) for job, name in wanted))
        most: dict[str, int] = {}
        while not asking.done():
            await asyncio.sleep(0.05)
            starting = [name for _, name in world.server.objects if not _runs(world.server, name)]
            counts = {job.key.name: sum(name.startswith(f"{job.key.name}-") for name in starting) for job in jobs}
            for name, count in {**counts, "all": len(starting)}.items():
                most[name] = max(most.get(name, 0), count)
        assert {answer.state for answer in await asking} == {"Running"}
        assert most["all"] == 5
        assert max(most[job.key.name] for job in jobs) == 3

    played(play, starts=5, starts_per_job=3)


def _runs(server: Server, name: str) -> bool:
    return bool(server.objects[NAMESPACE, name]["status"]["phase"] == "Running")


# Lives of workers.


def test_a_silent_workers_sandboxes_are_removed_after_the_lease_and_not_before() -> None:
    async def play(world: World) -> None:
        await world.ask("sb-1", lease_seconds=60)
        await world.ask("sb-2", lease_seconds=1200)
        heard = world.server.now()
        await asyncio.sleep(heard + 59 - world.server.now())
        assert world.pods() == {"tasks-sb-1", "tasks-sb-2"}
        await asyncio.sleep(SWEEP_SECONDS + 2)
        assert world.pods() == {"tasks-sb-2"}
        # Longer than anything else is remembered.
        await asyncio.sleep(heard + 1199 - world.server.now())
        assert world.pods() == {"tasks-sb-2"}
        await asyncio.sleep(SWEEP_SECONDS + 2)
        assert not world.pods()
        assert world.broker.removed["its worker is silent"] == 2
        # Who comes back is told.
        assert (await world.ask("sb-2", lease_seconds=1200)).state == "Ended"

    played(play)


def test_a_lease_that_is_shorter_than_the_pause_between_two_lists_is_no_end() -> None:
    async def play(world: World) -> None:
        await world.ask(lease_seconds=2)
        await world.live(100, "sb-1")
        assert world.pods() == {"tasks-sb-1"}

    played(play)


def test_what_a_worker_names_stays_and_what_it_no_longer_names_goes() -> None:
    async def play(world: World) -> None:
        await world.ask("sb-1")
        await world.ask("sb-2")
        await world.live(600, "sb-1", "sb-2")
        assert world.pods() == {"tasks-sb-1", "tasks-sb-2"}
        # It could not say that it gave one back.
        await world.live(20, "sb-2")
        assert world.pods() == {"tasks-sb-2"}
        assert (await world.ask("sb-1")).state == "Ended"

    played(play)


def test_a_list_that_crosses_a_request_removes_nothing() -> None:
    async def play(world: World) -> None:
        asking = asyncio.create_task(world.ask())
        await asyncio.sleep(0.5)
        # It was written before the request, and comes after it.
        world.renew()
        assert (await asking).state == "Running"
        world.renew()
        await world.live(100, "sb-1")
        assert world.pods() == {"tasks-sb-1"}

    played(play)


def test_a_start_that_nobody_waits_for_any_more_is_given_up() -> None:
    async def play(world: World) -> None:
        assert (await world.ask(seconds=5)).state == "Waiting"
        # That it was given back never arrived.
        await world.live(100)
        assert not world.broker._leases
        world.server.quota = None
        await world.live(100)
        assert not world.server.objects

    played(play, Server(quota=0))


def test_the_next_broker_keeps_what_workers_have() -> None:
    async def play(world: World) -> None:
        await world.ask("sb-1")
        await world.ask("sb-2")
        for killed in (False, True):
            await world.restart(killed=killed)
            await world.live(600, "sb-1", "sb-2")
            assert world.pods() == {"tasks-sb-1", "tasks-sb-2"}
        await world.broker.release("sb-1", JOB)
        await world.live(20, "sb-2")
        assert world.pods() == {"tasks-sb-2"}
        # One that is named no more goes, too, and one that has ended.
        world.server.end((NAMESPACE, "tasks-sb-2"))
        await world.live(10, "sb-2")
        assert not world.pods()
        assert world.server.asked["create"] == 2

    played(play)


def test_the_next_broker_removes_what_nobody_has_after_the_lease_and_not_before() -> None:
    async def play(world: World) -> None:
        await world.ask("sb-1", lease_seconds=60)
        await world.ask("sb-2", lease_seconds=60, worker="dead")
        await world.restart(killed=True)
        await world.live(50)
        assert world.pods() == {"tasks-sb-1", "tasks-sb-2"}
        await world.live(20)
        assert not world.pods()
        assert world.broker.removed == {"no worker has it": 1, "its worker is silent": 1}

    played(play)


def test_who_waits_while_the_broker_is_replaced_goes_on_waiting_at_the_next_one() -> None:
    async def play(world: World) -> None:
        asking = asyncio.create_task(world.ask(seconds=20))
        await asyncio.sleep(0.5)
        await world.restart()
        answer = await asking
        assert answer.state == "Waiting"
        assert answer.reason
        assert (await world.ask()).state == "Running"
        assert world.server.asked["create"] == 1

    played(play)


def test_a_broker_that_ends_makes_nothing_new() -> None:
    async def play(world: World) -> None:
        await world.broker.close()
        answer = await world.ask()
        assert answer.state == "Waiting"
        assert not world.server.asked

    played(play)


def test_a_broker_that_stood_still_hears_first_and_removes_later() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        stood = 0.0
        server = Server()
        broker = Broker(server, clock=lambda: loop.time() + stood)  # type: ignore[arg-type]
        server.watched_by(broker)
        sweeping = asyncio.create_task(broker.run())
        assert (await broker.want("sb-1", request(), context(), seconds=WAIT)).state == "Running"
        # As if the process had been stopped for minutes; what workers sent has not been read when it goes on.
        stood = 500.0
        await asyncio.sleep(SWEEP_SECONDS + 1)
        broker.renew(JOB, WORKER, frozenset({"sb-1"}))
        await asyncio.sleep(30)
        assert [pod["metadata"].get("deletionTimestamp") for pod in server.objects.values()] == [None]
        sweeping.cancel()
        await broker.close()

    in_virtual_time(main())


# Pods and watches.


@pytest.mark.parametrize("way", ["vanish", "end", "delete"])
def test_whoever_asks_is_told_that_a_pod_is_gone(way: str) -> None:
    async def play(world: World) -> None:
        await world.ask()
        if way == "vanish":
            world.server.vanish(PLACE)
        elif way == "end":
            world.server.end(PLACE)
        else:
            pod = world.server.objects[PLACE]
            pod["metadata"]["deletionTimestamp"] = "x"
            world.server.store(pod)
        await asyncio.sleep(1)
        answer = await world.ask()
        assert answer.state == "Ended"
        assert answer.reason
        # It stays until its worker knows.
        assert not world.server.asked["delete"]
        await world.broker.release("sb-1", JOB)
        await asyncio.sleep(10)
        assert way == "delete" or not world.server.objects

    played(play)


def test_a_container_beside_that_cannot_start_ends_no_sandbox_and_hides_no_end() -> None:
    async def play(world: World) -> None:
        await world.ask()
        pod = world.server.objects[PLACE]
        state = {"waiting": {"reason": "ErrImageNeverPull", "message": "x"}}
        pod["status"]["containerStatuses"].append({"name": "beside", "image": "x", "state": state})
        world.server.store(pod)
        await asyncio.sleep(1)
        assert (await world.ask()).state == "Running"
        world.server.end(PLACE)
        await asyncio.sleep(1)
        assert (await world.ask()).state == "Ended"

    played(play)


def test_a_broken_watch_that_lists_again_tells_what_was_missed() -> None:
    async def play(world: World) -> None:
        await world.ask("sb-1")
        world.server.break_watch()
        world.server.vanish(PLACE)
        asking = asyncio.create_task(world.ask("sb-2"))
        await asyncio.sleep(5)
        world.server.relist()
        assert (await asking).state == "Running"
        assert (await world.ask("sb-1")).state == "Ended"

    played(play)


def test_a_pod_whose_end_is_told_before_its_beginning_is_forgotten() -> None:
    async def play(world: World) -> None:
        world.server.latency = 4.0
        asking = asyncio.create_task(world.ask())
        await asyncio.sleep(3)
        world.server.vanish(PLACE)
        await asking
        await world.broker.release("sb-1", JOB)
        await world.live(100)
        assert world.server.asked["delete"] <= 1
        assert not world.broker.pods.all()

    played(play)


def test_a_deletion_that_fails_is_tried_again_until_it_is_done() -> None:
    async def play(world: World) -> None:
        await world.ask("sb-1")
        world.server.outage = refused(503)
        with pytest.raises(type(world.server.outage)):
            await world.broker.release("sb-1", JOB)
        await world.live(60)
        assert world.pods() == {"tasks-sb-1"}
        world.server.outage = None
        await world.live(10)
        assert not world.pods()
        assert max(world.server.answered.values()) == 1

    played(play)


def test_a_pod_that_leaves_slowly_is_deleted_once() -> None:
    async def play(world: World) -> None:
        await world.ask("sb-1")
        # Neither its end nor its deletion is told.
        world.server.break_watch()
        await world.broker.release("sb-1", JOB)
        await world.live(600)
        assert world.server.asked["delete"] == 1

    played(play, Server(end_seconds=1000))


def test_many_are_removed_side_by_side_and_one_that_hangs_stops_none() -> None:
    async def play(world: World) -> None:
        await asyncio.gather(*(world.ask(f"sb-{number}") for number in range(100)))
        world.server.latency = 10
        # One after another they would take a thousand seconds.
        await asyncio.sleep(60 + 2 * SWEEP_SECONDS + 100)
        assert not world.pods()

    played(play, starts_per_job=100)


def test_a_restored_history_is_taken_as_it_is() -> None:
    async def play(world: World) -> None:
        await world.ask("sb-1")
        for _ in range(50):
            world.server.store(world.server.objects[PLACE])
        await asyncio.sleep(1)
        world.server.break_watch()
        world.server._version, world.server._versions = 5, itertools.count(6)
        del world.server.objects[PLACE]
        world.server.relist()
        await asyncio.sleep(1)
        assert (await world.ask("sb-1")).state == "Ended"
        assert (await world.ask("sb-2")).state == "Running"

    played(play)


def test_a_lease_that_is_no_number_harms_no_broker() -> None:
    async def play(world: World) -> None:
        pod = build_pod("sb-9", request(), context())
        pod["metadata"] |= {"uid": "x", "annotations": {"kuberoll.io/lease-seconds": "soon"}}
        world.server.store(pod)
        await asyncio.sleep(50)
        assert world.pods() == {"tasks-sb-9"}
        await asyncio.sleep(20)
        assert not world.pods()

    played(play)


# Whom an image's commands run as.


def _identified(world: World, place: tuple[str, str], user: str, image: str = "sha256:1") -> None:
    pod = world.server.objects[place]
    ended = {"terminated": {"exitCode": 0, "message": user}}
    pod["status"]["initContainerStatuses"] = [{"name": "user", "state": ended}]
    pod["status"]["containerStatuses"][0]["imageID"] = image
    world.server.store(pod)


def test_whom_an_image_is_for_is_found_out_once_per_job() -> None:
    async def play(world: World) -> None:
        await world.ask("sb-1")
        _identified(world, PLACE, "1000:1000")
        await asyncio.sleep(1)
        await world.ask("sb-2")
        spec = world.server.objects[NAMESPACE, "tasks-sb-2"]["spec"]
        assert [item["name"] for item in spec["initContainers"]] == ["runtime"]
        # Another job does not take its word: who says it is a program that its worker names.
        await world.broker.want("sb-1", request(), context("other", uid="other"), seconds=WAIT)
        spec = world.server.objects[NAMESPACE, "other-sb-1"]["spec"]
        assert [item["name"] for item in spec["initContainers"]] == ["runtime", "user"]

    played(play)


def test_an_image_that_has_changed_is_asked_again() -> None:
    async def play(world: World) -> None:
        await world.ask("sb-1")
        _identified(world, PLACE, "1000:1000", "sha256:old")
        await asyncio.sleep(1)
        answer = await world.ask("sb-2")
        assert answer.state == "Ended"
        assert "another image by now" in answer.reason
        await world.ask("sb-3")
        spec = world.server.objects[NAMESPACE, "tasks-sb-3"]["spec"]
        assert [item["name"] for item in spec["initContainers"]] == ["runtime", "user"]

    played(play)


def test_numbers_of_sandboxes_by_state() -> None:
    async def play(world: World) -> None:
        await world.ask("sb-1")
        await world.ask("sb-2", seconds=1)
        world.server.quota = 0
        world.server.faults.append(Answer(lambda _, place: place[1] == "tasks-sb-4", refused(422)))
        await world.ask("sb-3", seconds=1)
        await world.ask("sb-4", seconds=1)
        states = world.broker.states()
        assert {state: count for state, count in states.items() if count} == {"Running": 2, "Waiting": 1, "Refused": 1}

    played(play)
