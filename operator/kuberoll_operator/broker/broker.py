"""Leases of sandboxes' pods: who wants one gets one, and what nobody wants any more is removed.

A pod is written twice, when it is made and when it is removed. What is known of leases is in memory: a broker that
starts finds its pods by their labels, and gives their workers the time of a lease to tell that they are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from kuberoll_api import sandboxes
from kuberoll_api.sandboxes import SandboxAnswer, SandboxRequest
from kuberoll_operator.broker.pods import PodKey, SandboxPod, SandboxPods, is_sandbox_of
from kuberoll_operator.broker.room import Room
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import ApiError, Conflict, Forbidden, Invalid, NotFound, QuotaExceeded, TooMany
from kuberoll_operator.kube.resources import PODS
from kuberoll_operator.model import Key
from kuberoll_operator.sandbox_pod import PodContext, build_pod, pod_name, problem

SWEEP_SECONDS: Final = 5.0
"""Time between two looks for what nobody wants any more."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
# A worker's list may cross a request of its own.
_CROSSING_SECONDS: Final = 3 * sandboxes.RENEW_SECONDS
_SPREAD: Final = 0.25
_LONGEST_RETRY: Final = 60.0
_REMOVALS: Final = 16
_MOST_IMAGES: Final = 100_000
# Longer than any request is under way.
_MEMORY_SECONDS: Final = 900.0

_log = logging.getLogger(__name__)


class _ImageUser(NamedTuple):
    """Whom the commands of an image run as, and which image that was."""

    image_id: str
    user: str


@dataclass(slots=True)
class _Worker:
    """What is known of a worker.

    Attributes:
        heard: When it was last heard of.
        has: The sandboxes that it last said it has.
    """

    heard: float
    has: frozenset[str] = frozenset()


class _Lease:
    """A sandbox that a worker wants, until it has given it back.

    Attributes:
        asked: When its worker last asked for it.
    """

    def __init__(self, key: PodKey, context: PodContext, sandbox: str, request: SandboxRequest, asked: float) -> None:
        self.key, self.context, self.sandbox, self.request, self.asked = key, context, sandbox, request, asked
        self.answer = SandboxAnswer(state="Waiting", reason="it waits for its turn to be made")
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.is_made = self.waits_for_room = False
        self.image_user: _ImageUser | None = None

    def say(self, answer: SandboxAnswer) -> None:
        """Note its state; what has once come to something does not wait again."""
        if answer.state == "Waiting" and self.changed.is_set():
            return
        self.answer = answer
        if answer.state != "Waiting":
            self.changed.set()

    def wait(self, reason: str) -> None:
        """Note what it waits for."""
        self.say(SandboxAnswer(state="Waiting", reason=reason))


class Broker:
    """Makes and removes pods of sandboxes.

    Args:
        starts: Pods that may be starting at a time.
        starts_per_job: The same of one job.

    Attributes:
        closed: True once it makes and removes nothing any more.
    """

    def __init__(
        self,
        client: Client,
        *,
        starts: int = 128,
        starts_per_job: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pods = SandboxPods(self._seen, clock=clock)
        self._client, self._clock = client, clock
        self._leases: dict[PodKey, _Lease] = {}
        self._workers: dict[tuple[Key, str], _Worker] = {}
        self._began = clock()
        self.closed = False
        self._starts = asyncio.Semaphore(starts)
        self._starts_of: defaultdict[Key, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(starts_per_job))
        self._events: defaultdict[PodKey, asyncio.Event] = defaultdict(asyncio.Event)
        self._rooms: defaultdict[str, Room] = defaultdict(Room)
        self._not_before = clock()
        # What was given back, by its job and the name of its pod, which may still be on its way.
        self._returned: dict[tuple[Key, str], float] = {}
        # Pods, by uid, whose deletion was asked for: one that is granted is not asked for again.
        self._deleted: dict[str, float] = {}
        self._removals = asyncio.Semaphore(_REMOVALS)
        # Of one job: whoever can name the image of another could tell anything of it.
        self._users: dict[tuple[str, str], _ImageUser] = {}
        self.made: Counter[str] = Counter()
        self.removed: Counter[str] = Counter()

    def states(self) -> Counter[str]:
        """Number of sandboxes by state; those that wait for their turn are among the waiting."""
        found: Counter[str] = Counter(pod.answer.state for _, pod in self.pods.all())
        found.update(lease.answer.state for lease in self._leases.values() if not lease.is_made)
        return found

    async def want(
        self, sandbox: str, request: SandboxRequest, context: PodContext, *, seconds: float
    ) -> SandboxAnswer:
        """Make a sandbox, or go on waiting for it.

        Args:
            sandbox: Its name.
            seconds: Time to wait for something to say.
        """
        self._hear(context.key, request.worker)
        key = (context.namespace, pod_name(context.key.name, sandbox))
        if (context.key, key[1]) in self._returned:
            # This request was overtaken by the one that gave it back, or the worker was silent for too long.
            return SandboxAnswer(state="Ended", reason="it was given back, or its worker was not heard of")
        lease = self._leases.get(key)
        if lease is None:
            if (refused := problem(request, context)) is not None:
                return SandboxAnswer(state="Refused", reason=refused)
            if self.closed:
                return SandboxAnswer(state="Waiting", reason="the broker ends, and another one takes its place")
            lease = self._leases[key] = _Lease(key, context, sandbox, request, self._clock())
            lease.task = asyncio.create_task(self._make(lease), name=f"make {key[1]}")
        elif lease.context.uid != context.uid or lease.request.worker != request.worker:
            return SandboxAnswer(state="Refused", reason="another worker has a sandbox of this name")
        lease.asked = self._clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await lease.changed.wait()
        lease.asked = self._clock()
        return lease.answer

    async def ending(self, sandbox: str, job: Key, *, seconds: float) -> SandboxAnswer:
        """What became of a sandbox that its worker has lost.

        Args:
            seconds: Time to wait for news of one that seems to run: who loses it may know that first.
        """
        key = (job.namespace, pod_name(job.name, sandbox))
        lease = self._leases.get(key)
        if lease is not None and lease.context.key == job:
            if lease.answer.state == "Running" and lease.task is not None:
                await asyncio.wait((lease.task,), timeout=seconds)
            return lease.answer
        pod = self.pods.get(key)
        if pod is not None and pod.job == job:
            return pod.answer
        return SandboxAnswer(state="Ended", reason="there is no pod of it")

    async def release(self, sandbox: str, job: Key) -> None:
        """Remove a sandbox.

        Raises:
            ApiError: The API server does not; it is tried again.
        """
        key = (job.namespace, pod_name(job.name, sandbox))
        self._returned[job, key[1]] = self._clock()
        lease = self._leases.get(key)
        if lease is not None and lease.context.key == job:
            del self._leases[key]
            await self._end(lease)
        pod = self.pods.get(key)
        if pod is not None and pod.job == job and not pod.leaving:
            await self._remove(key, pod, "released")

    def renew(self, job: Key, worker: str, wanted: frozenset[str]) -> None:
        """Note that a worker is there, and which sandboxes it has; others of its own are removed."""
        self._hear(job, worker).has = wanted
        for key in [key for key, lease in self._leases.items() if self._is_of(lease, job, worker)]:
            lease = self._leases[key]
            if lease.sandbox not in wanted and self._clock() - lease.asked > _CROSSING_SECONDS:
                self._forget(key, "its worker has it no more")

    def begin(self) -> None:
        """Begin to count: from now on workers can tell what they have."""
        self._began = self._clock()

    async def run(self) -> None:
        """Remove what nobody wants, until cancelled."""
        while True:
            due = self._clock() + SWEEP_SECONDS
            await asyncio.sleep(SWEEP_SECONDS)
            if self._clock() - due > SWEEP_SECONDS:
                # This process stood still, and what workers have told it meanwhile has not been read.
                self.begin()
            await self.sweep()

    async def sweep(self) -> None:
        """Remove what nobody wants: of workers that were not heard of, without a lease, and ended without a worker."""
        for key, lease in list(self._leases.items()):
            if self._is_silent(lease.context.key, lease.request.worker, lease.request.lease_seconds):
                self._forget(key, "its worker has not been heard of")
        left = [key for key, pod in self.pods.all() if self._left(key, pod) is not None]
        if errors := list(filter(None, await asyncio.gather(*map(self._clear, left)))):
            _log.warning("%d pods of sandboxes are removed later: %s", len(errors), errors[0])
        self._tidy()

    async def close(self) -> None:
        """End what is under way; pods stay, for the next broker, which those who wait are to ask."""
        self.closed = True
        tasks = [lease.task for lease in self._leases.values() if lease.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for lease in self._leases.values():
            lease.changed.set()

    async def _clear(self, key: PodKey) -> ApiError | None:
        async with self._removals:
            pod = self.pods.get(key)
            # Somebody may have asked for it meanwhile.
            if pod is None or (reason := self._left(key, pod)) is None:
                return None
            try:
                await self._remove(key, pod, reason)
            except ApiError as error:
                return error
        return None

    def _tidy(self) -> None:
        old = self._clock() - _MEMORY_SECONDS
        # However long the leases of its sandboxes are.
        needed = {(pod.job, pod.worker) for _, pod in self.pods.all()}
        needed |= {(lease.context.key, lease.request.worker) for lease in self._leases.values()}
        self._workers = {
            place: worker for place, worker in self._workers.items() if worker.heard > old or place in needed
        }
        self._returned = {place: at for place, at in self._returned.items() if at > old}
        self._deleted = {uid: at for uid, at in self._deleted.items() if at > old}
        for job in set(self._starts_of) - {lease.context.key for lease in self._leases.values()}:
            del self._starts_of[job]

    def _left(self, key: PodKey, pod: SandboxPod) -> str | None:
        """Why a pod is to be removed; None: it is not, or is being removed already."""
        if pod.leaving or pod.uid in self._deleted:
            return None
        if self._is_silent(pod.job, pod.worker, pod.lease_seconds):
            return "its worker is silent"
        if (pod.job, key[1]) in self._returned:
            return "released"
        lease = self._leases.get(key)
        if lease is not None and lease.context.key == pod.job:
            # Its worker is told first.
            return None
        if pod.answer.state == "Ended":
            return "it has ended"
        worker = self._workers.get((pod.job, pod.worker))
        if worker is not None and key[1].removeprefix(pod_name(pod.job.name, "")) in worker.has:
            # A broker before this one has made it.
            return None
        # Since this broker began nobody has asked for it: a worker that waits asks again, one that has it tells so.
        if self._clock() - max(pod.since, self._began) > max(pod.lease_seconds, _CROSSING_SECONDS):
            return "no worker has it"
        return None

    def _hear(self, job: Key, worker: str) -> _Worker:
        known = self._workers.setdefault((job, worker), _Worker(self._clock()))
        known.heard = self._clock()
        return known

    def _is_silent(self, job: Key, worker: str, seconds: float) -> bool:
        known = self._workers.get((job, worker))
        heard = self._began if known is None else max(known.heard, self._began)
        # Whoever has shorter leases does not tell more often.
        return self._clock() - heard > max(seconds, _CROSSING_SECONDS)

    @staticmethod
    def _is_of(lease: _Lease, job: Key, worker: str) -> bool:
        return lease.context.key == job and lease.request.worker == worker

    def _forget(self, key: PodKey, reason: str) -> None:
        lease = self._leases.pop(key)
        self._returned[lease.context.key, key[1]] = self._clock()
        if lease.task is not None:
            lease.task.cancel()
        lease.say(SandboxAnswer(state="Ended", reason=reason))

    async def _end(self, lease: _Lease) -> None:
        if lease.task is not None:
            lease.task.cancel()
            await asyncio.wait((lease.task,))
        lease.say(SandboxAnswer(state="Ended", reason="it was given back"))

    async def _make(self, lease: _Lease) -> None:
        """Make a pod, and follow it to its end."""
        try:
            async with self._starts_of[lease.context.key]:
                await self._start(lease)
            if lease.is_made and lease.answer.state in ("Running", "Waiting"):
                await self._follow(lease)
        except Exception as error:
            _log.exception("the sandbox %s cannot be made", lease.key[1])
            lease.say(SandboxAnswer(state="Ended", reason=f"the broker failed: {error}"))

    async def _start(self, lease: _Lease) -> None:
        """Create the pod, however long that takes, and follow it until it runs, or waits for a node."""
        pause, room = _FIRST_PAUSE, self._rooms[lease.key[0]]
        while True:
            if (wait := self._not_before - self._clock()) > 0:
                await asyncio.sleep(wait * (1 + random.random() * _SPREAD))
            left = room.left
            async with self._starts:
                if await self._create(lease, pause):
                    if lease.is_made:
                        room.enter()
                        await self._follow(lease, while_it_starts=True)
                    return
            # Whoever waits here keeps nobody of other jobs from starting.
            seconds = pause * (1 + random.random() * _SPREAD)
            if lease.waits_for_room:
                await room.wait(seconds, left)
            else:
                await asyncio.sleep(seconds)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _create(self, lease: _Lease, pause: float) -> bool:
        """Try to create the pod; False if that is to be tried again."""
        lease.waits_for_room = False
        if (known := self.pods.get(lease.key)) is not None:
            # A broker before this one has made it, or an answer was lost.
            return self._adopt(lease, known)
        try:
            lease.image_user = learnt = self._users.get((lease.context.uid, lease.request.image))
            user = None if learnt is None else learnt.user
            made = await self._client.create(build_pod(lease.sandbox, lease.request, lease.context, user=user))
        except Conflict as error:
            return await self._meet(lease, error)
        except QuotaExceeded as error:
            self.made["quota"] += 1
            lease.waits_for_room = True
            lease.wait(f"it waits for quota: {error.message}")
        except TooMany as error:
            self.made["throttled"] += 1
            lease.wait("the API server has too much to do")
            # That holds for all.
            self._not_before = self._clock() + min(error.retry_after or pause, _LONGEST_RETRY)
        except (Forbidden, Invalid, NotFound) as error:
            self.made["refused"] += 1
            lease.say(SandboxAnswer(state="Refused", reason=_explained(error)))
            return True
        except ApiError as error:
            self._fail(lease, error)
        else:
            self.made["made"] += 1
            lease.is_made = True
            self.pods.put(made)
            return True
        return False

    async def _meet(self, lease: _Lease, conflict: Conflict) -> bool:
        """Look at the pod that has the name already; False if there is none."""
        try:
            found = await self._client.get(PODS, *lease.key)
        except ApiError as error:
            self._fail(lease, error)
            return False
        if found is None:
            # It is gone by now, or something else was changed by two at a time, such as a quota.
            self._fail(lease, conflict)
            return False
        if not is_sandbox_of(found, lease.context):
            lease.say(SandboxAnswer(state="Refused", reason=f"{lease.key[1]}: another pod has this name"))
            return True
        self.pods.put(found)
        known = self.pods.get(lease.key)
        return known is not None and self._adopt(lease, known)

    def _fail(self, lease: _Lease, error: ApiError) -> None:
        self.made["failed"] += 1
        lease.wait(f"the API server does not make its pod: {error}")

    def _adopt(self, lease: _Lease, pod: SandboxPod) -> bool:
        if (pod.job, pod.worker) == (lease.context.key, lease.request.worker):
            lease.is_made = True
        else:
            lease.say(SandboxAnswer(state="Refused", reason="there is a pod of this name that another worker has"))
        return True

    async def _follow(self, lease: _Lease, *, while_it_starts: bool = False) -> None:
        """Note the states of a pod until it is gone.

        Args:
            while_it_starts: True to return when it runs, and when no node has room for it: then it starts no more than
                one that was not made, and others may.
        """
        event = self._events[lease.key]
        try:
            while True:
                event.clear()
                pod = self.pods.get(lease.key)
                if pod is None:
                    lease.say(SandboxAnswer(state="Ended", reason="its pod was deleted", event="Deleted"))
                    return
                if self._is_another_image(lease, pod):
                    # Under another user than its image says, nothing in it counts.
                    lease.say(SandboxAnswer(state="Ended", reason=f"{lease.request.image} is another image by now"))
                    return
                if pod.answer.state == "Refused" and lease.answer.state == "Running":
                    # It is of a container beside, and its own one runs.
                    await event.wait()
                    continue
                lease.say(pod.answer)
                is_starting = pod.answer.state == "Waiting" and not pod.waits_for_a_node
                if pod.answer.state in ("Ended", "Refused") or (while_it_starts and not is_starting):
                    return
                await event.wait()
        finally:
            self._events.pop(lease.key, None)

    def _is_another_image(self, lease: _Lease, pod: SandboxPod) -> bool:
        """Learn whom an image's commands run as; True if that was of another image of this name."""
        image = (lease.context.uid, lease.request.image)
        if pod.image_id is None:
            return False
        if pod.user is not None:
            if len(self._users) >= _MOST_IMAGES:
                self._users.clear()
            self._users[image] = _ImageUser(pod.image_id, pod.user)
        elif lease.image_user is not None and lease.image_user.image_id != pod.image_id:
            self._users.pop(image, None)
            return True
        return False

    async def _remove(self, key: PodKey, pod: SandboxPod, reason: str) -> None:
        if pod.uid in self._deleted:
            return
        self._deleted[pod.uid] = self._clock()
        try:
            is_there = await self._delete(key, pod.uid)
        except BaseException:
            self._deleted.pop(pod.uid, None)
            raise
        if is_there:
            self.removed[reason] += 1
        else:
            # Its deletion was told before the answer that it was made, which was taken for news.
            self.pods.forget(key, pod.uid)

    async def _delete(self, key: PodKey, uid: str) -> bool:
        """Delete a pod; False if it is gone already."""
        try:
            return await self._client.delete(PODS, *key, uid=uid)
        except Conflict:
            found = await self._client.get(PODS, *key)
            if found is not None and found["metadata"]["uid"] == uid:
                raise
            # Another pod has its name by now.
            return False

    def _seen(self, key: PodKey) -> None:
        if (event := self._events.get(key)) is not None:
            event.set()
        pod = self.pods.get(key)
        # What has ended takes no quota.
        if pod is None or pod.answer.state == "Ended":
            self._rooms[key[0]].leave()


def _explained(error: ApiError) -> str:
    if "violates PodSecurity" in error.message:
        return (
            f"{error.message}; sandboxes have a root of their own, as containers usually do: label their namespace "
            "pod-security.kubernetes.io/enforce=baseline"
        )
    return str(error)
