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
from typing import Final, NamedTuple

from kuberoll_api import sandboxes
from kuberoll_api.sandboxes import SandboxAnswer, SandboxRequest
from kuberoll_operator.broker.pod import PodContext, build_pod, pod_name, problem
from kuberoll_operator.broker.pods import PodKey, SandboxPod, SandboxPods
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import ApiError, Conflict, Forbidden, Invalid, NotFound, QuotaExceeded, TooMany
from kuberoll_operator.kube.resources import PODS
from kuberoll_operator.model import Key

SWEEP_SECONDS: Final = 5.0
"""Time between two looks for what nobody wants any more."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
# A worker's list may cross a request of its own.
_CROSSING_SECONDS: Final = 3 * sandboxes.RENEW_SECONDS
_SPREAD: Final = 0.25
_MOST_IMAGES: Final = 100_000
# Longer than any request is under way.
_MEMORY_SECONDS: Final = 900.0

_log = logging.getLogger(__name__)


class _ImageUser(NamedTuple):
    """Whom the commands of an image run as, and which image that was."""

    image_id: str
    user: str


class _Lease:
    """A sandbox that a worker wants, until it has given it back."""

    def __init__(self, key: PodKey, context: PodContext, sandbox: str, request: SandboxRequest) -> None:
        self.key, self.context, self.sandbox, self.request = key, context, sandbox, request
        self.answer = SandboxAnswer(state="Waiting", reason="it waits for its turn to be made")
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.is_made = False
        self.image_user: _ImageUser | None = None

    def say(self, answer: SandboxAnswer) -> None:
        """Note its state."""
        self.answer = answer
        if answer.state != "Waiting":
            self.changed.set()


class Broker:
    """Makes and removes pods of sandboxes.

    Args:
        starts: Pods that may be starting at a time.
        starts_per_job: The same of one job.
    """

    def __init__(
        self,
        client: Client,
        *,
        starts: int = 512,
        starts_per_job: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pods = SandboxPods(self._seen, clock=clock)
        self._client, self._clock = client, clock
        self._leases: dict[PodKey, _Lease] = {}
        self._heard: dict[tuple[Key, str], float] = {}
        self._began = clock()
        self._starts = asyncio.Semaphore(starts)
        self._starts_of: defaultdict[Key, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(starts_per_job))
        self._events: defaultdict[PodKey, asyncio.Event] = defaultdict(asyncio.Event)
        self._room: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._not_before = 0.0
        # What was given back: a pod of this name may still be on its way.
        self._returned: dict[PodKey, float] = {}
        self._users: dict[str, _ImageUser] = {}
        self.made: Counter[str] = Counter()
        self.removed: Counter[str] = Counter()

    def states(self) -> Counter[str]:
        """Number of sandboxes by state; those that wait for their turn are among the waiting."""
        found: Counter[str] = Counter(pod.answer.state for _, pod in self.pods.all())
        found["Waiting"] += sum(not lease.is_made for lease in self._leases.values())
        return found

    async def want(
        self, sandbox: str, request: SandboxRequest, context: PodContext, *, seconds: float
    ) -> SandboxAnswer:
        """Make a sandbox, or go on waiting for it.

        Args:
            sandbox: Its name.
            seconds: Time to wait for something to say.
        """
        self._heard[context.key, request.worker] = self._clock()
        key = (context.namespace, pod_name(context.key.name, sandbox))
        lease = self._leases.get(key)
        if lease is None:
            if (refused := problem(request, context)) is not None:
                return SandboxAnswer(state="Refused", reason=refused)
            lease = self._leases[key] = _Lease(key, context, sandbox, request)
            lease.task = asyncio.create_task(self._make(lease), name=f"make {key[1]}")
        elif lease.context.uid != context.uid or lease.request.worker != request.worker:
            return SandboxAnswer(state="Refused", reason="another worker has a sandbox of this name")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await lease.changed.wait()
        return lease.answer

    async def release(self, sandbox: str, job: Key) -> None:
        """Remove a sandbox.

        Raises:
            ApiError: The API server does not; it is tried again.
        """
        key = (job.namespace, pod_name(job.name, sandbox))
        self._returned[key] = self._clock()
        if (lease := self._leases.pop(key, None)) is not None:
            await self._end(lease)
        pod = self.pods.get(key)
        if pod is not None and pod.job == job and not pod.leaving:
            await self._remove(key, pod, "released")

    def renew(self, job: Key, worker: str, wanted: frozenset[str]) -> None:
        """Note that a worker is there, and which sandboxes it has; others of its own are removed."""
        self._heard[job, worker] = self._clock()
        for name in [key for key, lease in self._leases.items() if self._is_of(lease, job, worker)]:
            if self._leases[name].sandbox not in wanted and not self._crosses(name):
                self._forget(name)

    def begin(self) -> None:
        """Begin to count: from now on workers can tell what they have."""
        self._began = self._clock()

    async def run(self) -> None:
        """Remove what nobody wants, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await self.sweep()

    async def sweep(self) -> None:
        """Remove what nobody wants: of workers that were not heard of, without a lease, and ended without a worker."""
        for key, lease in list(self._leases.items()):
            if self._is_silent(lease.context.key, lease.request.worker, lease.request.lease_seconds):
                self._forget(key)
        reasons = {key: reason for key, pod in self.pods.all() if (reason := self._left(key, pod)) is not None}
        for key, reason in reasons.items():
            pod = self.pods.get(key)
            if pod is None or pod.leaving:
                continue
            try:
                await self._remove(key, pod, reason)
            except ApiError as error:
                _log.warning("the pod %s/%s is removed later: %s", *key, error)
        self._tidy()

    async def close(self) -> None:
        """End what is under way; pods stay, for the next broker."""
        for lease in list(self._leases.values()):
            await self._end(lease)

    def _tidy(self) -> None:
        for memory in (self._heard, self._returned):
            for place in [place for place, at in memory.items() if self._clock() - at > _MEMORY_SECONDS]:
                del memory[place]  # type: ignore[arg-type]
        for job in set(self._starts_of) - {lease.context.key for lease in self._leases.values()}:
            del self._starts_of[job]

    def _left(self, key: PodKey, pod: SandboxPod) -> str | None:
        """Why a pod is to be removed; None: it is not."""
        if pod.leaving:
            return None
        if self._is_silent(pod.job, pod.worker, pod.lease_seconds):
            return "its worker is silent"
        if key in self._returned:
            return "released"
        if key in self._leases:
            # Its worker is told first.
            return None
        if pod.answer.state == "Ended":
            return "it has ended"
        # Since this broker began nobody has asked for it: a worker that waits asks again, one that has it tells so.
        if self._clock() - max(pod.since, self._began) > max(pod.lease_seconds, _CROSSING_SECONDS):
            return "no worker has it"
        return None

    def _is_silent(self, job: Key, worker: str, seconds: float) -> bool:
        return self._clock() - max(self._heard.get((job, worker), 0.0), self._began) > seconds

    def _crosses(self, key: PodKey) -> bool:
        pod = self.pods.get(key)
        return pod is None or self._clock() - pod.since < _CROSSING_SECONDS

    @staticmethod
    def _is_of(lease: _Lease, job: Key, worker: str) -> bool:
        return lease.context.key == job and lease.request.worker == worker

    def _forget(self, key: PodKey) -> None:
        self._returned[key] = self._clock()
        lease = self._leases.pop(key)
        if lease.task is not None:
            lease.task.cancel()
        lease.say(SandboxAnswer(state="Ended", reason="its worker has not been heard of"))

    async def _end(self, lease: _Lease) -> None:
        if lease.task is not None:
            lease.task.cancel()
            await asyncio.wait((lease.task,))
        lease.say(SandboxAnswer(state="Ended", reason="it was given back"))

    async def _make(self, lease: _Lease) -> None:
        """Make a pod, and follow it to its end."""
        try:
            async with self._starts_of[lease.context.key], self._starts:
                if await self._create(lease):
                    await self._follow(lease, until_it_runs=True)
            if lease.answer.state == "Running":
                await self._follow(lease, until_it_runs=False)
        except Exception as error:
            _log.exception("the sandbox %s cannot be made", lease.key[1])
            lease.say(SandboxAnswer(state="Ended", reason=f"the broker failed: {error}"))

    async def _create(self, lease: _Lease) -> bool:
        """Create the pod, however long that takes; False if it cannot be."""
        pause = _FIRST_PAUSE
        while not lease.is_made:
            if (known := self.pods.get(lease.key)) is not None:
                # A broker before this one has made it, or an answer was lost.
                return self._adopt(lease, known.worker)
            if (wait := self._not_before - self._clock()) > 0:
                await asyncio.sleep(wait * (1 + random.random() * _SPREAD))
            full = False
            try:
                lease.image_user = learnt = self._users.get(lease.request.image)
                user = None if learnt is None else learnt.user
                made = await self._client.create(build_pod(lease.sandbox, lease.request, lease.context, user=user))
            except Conflict:
                found = await self._client.get(PODS, *lease.key)
                if found is not None:
                    self.pods.put(found)
                continue
            except QuotaExceeded as error:
                self.made["quota"] += 1
                full = True
                lease.answer = SandboxAnswer(state="Waiting", reason=f"it waits for quota: {error.message}")
            except TooMany as error:
                self.made["throttled"] += 1
                lease.answer = SandboxAnswer(state="Waiting", reason="the API server has too much to do")
                # That holds for all.
                self._not_before = self._clock() + (error.retry_after or pause)
            except (Forbidden, Invalid, NotFound) as error:
                self.made["refused"] += 1
                lease.say(SandboxAnswer(state="Refused", reason=_explained(error)))
                return False
            except ApiError as error:
                self.made["failed"] += 1
                lease.answer = SandboxAnswer(state="Waiting", reason=f"the API server does not answer: {error}")
            else:
                self.made["made"] += 1
                lease.is_made = True
                self.pods.put(made)
                return True
            await self._pause(pause, lease.key[0] if full else None)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    async def _pause(self, seconds: float, namespace: str | None) -> None:
        """Wait before the next try; where a namespace is full, until something leaves it."""
        seconds *= 1 + random.random() * _SPREAD
        if namespace is None:
            await asyncio.sleep(seconds)
            return
        room = self._room[namespace]
        room.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await room.wait()

    def _adopt(self, lease: _Lease, worker: str) -> bool:
        if worker != lease.request.worker:
            lease.say(SandboxAnswer(state="Refused", reason="there is a pod of this name that another worker has"))
            return False
        lease.is_made = True
        return True

    async def _follow(self, lease: _Lease, *, until_it_runs: bool) -> None:
        """Note the states of a pod, until it runs or is gone."""
        event = self._events[lease.key]
        try:
            while True:
                event.clear()
                pod = self.pods.get(lease.key)
                if pod is None:
                    lease.say(SandboxAnswer(state="Ended", reason="its pod was deleted"))
                    return
                if pod.answer.state == "Refused" and lease.answer.state == "Running":
                    return
                if self._is_another_image(lease, pod):
                    # Under another user than its image says, nothing in it counts.
                    lease.say(SandboxAnswer(state="Ended", reason=f"{lease.request.image} is another image by now"))
                    return
                lease.say(pod.answer)
                if pod.answer.state in ("Ended", "Refused") or (until_it_runs and pod.answer.state == "Running"):
                    return
                await event.wait()
        finally:
            self._events.pop(lease.key, None)

    def _is_another_image(self, lease: _Lease, pod: SandboxPod) -> bool:
        """Learn whom an image's commands run as; True if that was of another image of this name."""
        image = lease.request.image
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
        await self._client.delete(PODS, *key, uid=pod.uid)
        self.removed[reason] += 1

    def _seen(self, key: PodKey) -> None:
        if (event := self._events.get(key)) is not None:
            event.set()
        pod = self.pods.get(key)
        # What has ended takes no quota.
        if (pod is None or pod.answer.state == "Ended") and (room := self._room.get(key[0])) is not None:
            room.set()


def _explained(error: ApiError) -> str:
    if "violates PodSecurity" in error.message:
        return (
            f"{error.message}; sandboxes have a root of their own, as containers usually do: label their namespace "
            "pod-security.kubernetes.io/enforce=baseline"
        )
    return str(error)
