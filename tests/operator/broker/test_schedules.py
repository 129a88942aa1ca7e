"""Whatever happens in whatever order: what workers have stays, what they have not goes, and nothing comes back."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_api.sandboxes import SandboxAnswer
from kuberoll_operator.broker.broker import Broker
from kuberoll_operator.kube.errors import ApiError
from kuberoll_operator.model import Key
from tests.examples import examples
from tests.operator.broker.memory import Answer, Server, broker_of, lost, refused
from tests.operator.broker.support import context, request
from tests.operator.emulator import in_virtual_time
from tests.operator.support import NAMESPACE

JOB = Key(NAMESPACE, "tasks")
LEASE = 60.0
# The lease, a list that crosses, a sweep, the pauses of what is tried again, and a watch that is silent meanwhile.
BOUND = LEASE + 30 + 5 + 3 * 16 + 60


@dataclass(slots=True)
class Worker:
    """A worker as the driver is one: asks until it is answered, names what it has, and gives back what it has not."""

    name: str
    world: World
    wanted: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    heartbeat: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self.heartbeat = asyncio.create_task(self._renew())

    def start(self, sandbox: str) -> None:
        self.wanted.add(sandbox)
        self.tasks[sandbox] = asyncio.create_task(self._ask(sandbox))

    async def release(self, sandbox: str) -> None:
        """Give a sandbox back, which the broker may not hear of."""
        self.tasks.pop(sandbox).cancel()
        with contextlib.suppress(ApiError):
            if (broker := self.world.broker) is not None:
                await broker.release(sandbox, JOB)
                self.released.add(sandbox)
        self.wanted.discard(sandbox)
        self.running.discard(sandbox)

    def kill(self) -> None:
        assert self.heartbeat is not None
        for task in (self.heartbeat, *self.tasks.values()):
            task.cancel()
        self.wanted.clear()
        self.running.clear()

    async def _ask(self, sandbox: str) -> None:
        while True:
            broker = self.world.broker
            if broker is None:
                await asyncio.sleep(1)
                continue
            wish = request(worker=self.name, lease_seconds=LEASE)
            # Whoever is cancelled leaves a request behind that goes on, as HTTP has it.
            answer: SandboxAnswer = await asyncio.shield(
                asyncio.create_task(broker.want(sandbox, wish, context(), seconds=20.0))
            )
            assert answer.state == "Running" or answer.reason, answer
            if answer.state == "Running":
                self.running.add(sandbox)
                return
            if answer.state != "Waiting":
                self.gone.add(sandbox)
                return
            await asyncio.sleep(0.05)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(10)
            if (broker := self.world.broker) is not None:
                broker.renew(JOB, self.name, frozenset(self.wanted))


class World:
    """One broker at a time, three workers, and the API server."""

    def __init__(self, seed: Any) -> None:
        self.server = Server(start_seconds=seed["start"], latency=seed["latency"], watch_delay=seed["delay"])
        self.broker: Broker | None = None
        self.workers: dict[str, Worker] = {}
        self.lost_by_others: set[str] = set()
        self.returned: set[str] = set()
        self._sweeping: asyncio.Task[None] | None = None
        self._count = 0
        self.up()

    def up(self) -> None:
        if self.broker is None:
            self.broker = broker_of(self.server, starts=4, starts_per_job=3)
            self._sweeping = asyncio.create_task(self.broker.run())

    async def down(self, *, killed: bool) -> None:
        broker, self.broker = self.broker, None
        if broker is None:
            return
        assert self._sweeping is not None
        self._sweeping.cancel()
        if killed:
            for lease in broker._leases.values():
                assert lease.task is not None
                lease.task.cancel()
        await broker.close()

    async def do(self, step: tuple[str, Any]) -> None:
        """One step of a schedule."""
        kind, what = step
        workers = list(self.workers.values())
        if kind == "pass":
            await asyncio.sleep(what)
        elif kind == "worker":
            self._count += 1
            name = f"worker-{self._count}"
            self.workers[name] = Worker(name, self)
            self.workers[name].begin()
        elif kind == "start" and workers:
            self._count += 1
            workers[what % len(workers)].start(f"sb-{self._count}")
        elif kind == "release":
            having = [(worker, name) for worker in workers for name in sorted(worker.tasks)]
            if having:
                worker, name = having[what % len(having)]
                await worker.release(name)
                self.returned.add(name)
        elif kind == "kill" and workers:
            workers[what % len(workers)].kill()
            del self.workers[workers[what % len(workers)].name]
        elif kind == "evict":
            places = sorted(self.server.objects)
            if places:
                place = places[what % len(places)]
                self.lost_by_others.add(place[1].removeprefix("tasks-"))
                self.server.end(place) if what % 2 else self.server.vanish(place)
        elif kind == "fault":
            verb = what[0]
            error = lost() if what[1] == 0 else refused(what[1], "exceeded quota" if what[1] == 403 else "x")
            self.server.faults.append(
                Answer(lambda asked, _: asked == verb, error, after=what[2] and what[1] in (0, 500))
            )
        elif kind == "outage":
            self.server.outage = refused(503)
            await asyncio.sleep(what)
            self.server.outage = None
        elif kind == "watch" and self.broker is not None:
            self.server.break_watch()
            await asyncio.sleep(what)
            self.server.relist()
        elif kind == "restart":
            await self.down(killed=bool(what % 2))
            await asyncio.sleep(what)
            self.up()
        elif kind == "quota":
            self.server.quota = what

    def check(self) -> None:
        """What is true at any time."""
        created = [place[1].removeprefix("tasks-") for _, verb, place in self.server.log if verb == "create"]
        # One that others removed before its worker heard of it is made again by a broker that knows nothing of it.
        created = [sandbox for sandbox in created if sandbox not in self.lost_by_others]
        assert len(created) == len(set(created)), "a pod was made twice"
        assert all(count == 1 for (verb, _), count in self.server.answered.items() if verb == "delete")
        leaving = {
            place[1].removeprefix("tasks-")
            for place, pod in self.server.objects.items()
            if "deletionTimestamp" in pod["metadata"]
        }
        for worker in self.workers.values():
            taken = (worker.wanted & leaving) - self.lost_by_others
            assert not taken, f"{taken} of {worker.name} are removed"
            assert not worker.gone - self.lost_by_others, "one that nobody has touched is gone"

    def check_at_rest(self) -> None:
        """What is true after everything has had its time."""
        self.check()
        wanted = {name for worker in self.workers.values() for name in worker.wanted}
        there = {name.removeprefix("tasks-") for _, name in self.server.objects}
        assert there <= wanted, "pods that nobody has are left"
        for worker in self.workers.values():
            missing = worker.wanted - worker.running - worker.gone
            assert not missing, f"{missing} still wait"
            assert worker.running - self.lost_by_others <= there


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.sampled_from([0.003, 0.02, 0.5, 1.01, 4.99, 12.0, 45.0, 100.0])),
        st.tuples(st.just("worker"), st.just(0)),
        st.tuples(st.just("start"), st.integers(0, 7)),
        st.tuples(st.just("start"), st.integers(0, 7)),
        st.tuples(st.just("release"), st.integers(0, 7)),
        st.tuples(st.just("kill"), st.integers(0, 7)),
        st.tuples(st.just("evict"), st.integers(0, 7)),
        st.tuples(
            st.just("fault"),
            st.tuples(
                st.sampled_from(["create", "get", "delete"]), st.sampled_from([0, 429, 500, 403, 409]), st.booleans()
            ),
        ),
        st.tuples(st.just("outage"), st.sampled_from([1.0, 30.0, 300.0])),
        st.tuples(st.just("watch"), st.sampled_from([0.5, 30.0])),
        st.tuples(st.just("restart"), st.sampled_from([0, 1, 5, 30])),
        st.tuples(st.just("quota"), st.sampled_from([None, 0, 2, 5])),
    ),
    max_size=40,
)
_SEED = st.fixed_dictionaries(
    {
        "start": st.sampled_from([0.1, 1.0, 20.0]),
        "latency": st.sampled_from([0.002, 0.01, 2.0]),
        "delay": st.sampled_from([0.0, 0.02, 3.0]),
    }
)


@settings(max_examples=examples(300))
@given(_SEED, _STEPS)
def test_every_pod_is_somebodys_or_is_removed(seed: Any, steps: list[tuple[str, Any]]) -> None:
    async def main() -> None:
        world = World(seed)
        await world.do(("worker", 0))
        for step in steps:
            await world.do(step)
            world.check()
        # Everything is mended, and has its time.
        world.server.quota = None
        world.server.faults.clear()
        world.up()
        await asyncio.sleep(BOUND + 2 * seed["start"] * len(steps))
        world.check_at_rest()
        for worker in world.workers.values():
            worker.kill()
        world.workers.clear()
        await asyncio.sleep(BOUND)
        world.check_at_rest()
        assert not world.server.objects
        await world.down(killed=False)

    in_virtual_time(main())
