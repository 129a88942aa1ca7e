"""An API server and a kubelet in memory, whose time is the loop's: for brokers in virtual time.

It has pods only. What a request does and what a watch tells are apart, as they are in a cluster: an answer may be lost,
and a watch may be late, or broken until it lists again.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kuberoll_operator.broker.broker import Broker
from kuberoll_operator.broker.pods import SELECTOR, SandboxPods
from kuberoll_operator.kube.errors import ApiError, Unavailable, error_of
from kuberoll_operator.kube.resources import PODS, Resource
from kuberoll_operator.model import Object

Place = tuple[str, str]


@dataclass(slots=True)
class Answer:
    """What is answered instead.

    Attributes:
        meant: Which requests, by verb and place.
        after: True if the request is carried out, and its answer lost.
        times: How often.
    """

    meant: Callable[[str, Place], bool]
    error: ApiError
    after: bool = False
    times: int = 1


def refused(code: int, message: str = "", *, reason: str = "", retry_after: str | None = None) -> ApiError:
    """An error of the API server."""
    return error_of(code, {"message": message, "reason": reason}, "create /api/v1/pods", retry_after)


@dataclass(slots=True, kw_only=True)
class Server:
    """The API server, its kubelet, and the watches of one broker at a time.

    Attributes:
        latency: Seconds that a request takes to be carried out, and its answer to come.
        watch_delay: Seconds after which a watch tells.
        start_seconds: Seconds after which a pod runs; None: it never does.
        end_seconds: Seconds between a deletion and its end.
        quota: How many pods that have not ended there may be.
        outage: What all requests are answered; None: nothing is amiss.
        answered: Number of successful answers by verb and place; deletions by uid.
        log: All that was carried out: time, verb, place.
    """

    latency: float = 0.01
    watch_delay: float = 0.02
    start_seconds: float | None = 1.0
    end_seconds: float = 2.0
    quota: int | None = None
    outage: ApiError | None = None
    faults: list[Answer] = field(default_factory=list)
    objects: dict[Place, Object] = field(default_factory=dict)
    answered: Counter[tuple[str, Any]] = field(default_factory=Counter)
    log: list[tuple[float, str, Place]] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    _versions: Any = field(default_factory=lambda: itertools.count(1))
    _version: int = 0
    _sink: SandboxPods | None = None
    _is_broken: bool = False

    # What a client has.

    async def create(self, item: Object) -> Object:
        place = (item["metadata"]["namespace"], item["metadata"]["name"])
        return await self._carry_out("create", place, lambda: self._create(place, item))  # type: ignore[return-value]

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        assert resource == PODS
        place = (namespace, name)
        return await self._carry_out("get", place, lambda: copy.deepcopy(self.objects.get(place)))  # type: ignore[return-value]

    async def delete(self, resource: Resource, namespace: str, name: str, *, uid: str) -> bool:
        assert resource == PODS
        place = (namespace, name)
        found = bool(await self._carry_out("delete", place, lambda: self._delete(place, uid)))
        if found:
            self.answered["delete", uid] += 1
        return found

    async def _carry_out(self, verb: str, place: Place, does: Callable[[], object]) -> object:
        self.asked[verb] += 1
        await asyncio.sleep(self.latency / 2)
        fault = next((one for one in self.faults if one.times and one.meant(verb, place)), None)
        if fault is not None:
            fault.times -= 1
            if fault.after:
                does()
            raise fault.error
        if self.outage is not None:
            raise self.outage
        found = does()
        self.log.append((self.now(), verb, place))
        try:
            await asyncio.sleep(self.latency / 2)
        except asyncio.CancelledError:
            self.answered["lost", verb] += 1
            raise
        if verb == "create":
            self.answered[verb, place] += 1
        return found

    def _create(self, place: Place, item: Object) -> Object:
        if place in self.objects:
            raise refused(409, f'pods "{place[1]}" already exists', reason="AlreadyExists")
        if self.quota is not None and sum(not _has_ended(pod) for pod in self.objects.values()) >= self.quota:
            raise refused(403, f'pods "{place[1]}" is forbidden: exceeded quota: pods, limited: pods={self.quota}')
        made = copy.deepcopy(item)
        made["metadata"]["uid"] = f"uid-{next(self._versions)}"
        made["status"] = {"phase": "Pending"}
        self.store(made)
        if self.start_seconds is not None:
            uid = made["metadata"]["uid"]
            asyncio.get_running_loop().call_later(self.start_seconds, lambda: self._run(place, uid))
        return copy.deepcopy(made)

    def _delete(self, place: Place, uid: str) -> bool:
        known = self.objects.get(place)
        if known is None:
            return False
        if known["metadata"]["uid"] != uid:
            raise refused(409, "the UID in the precondition does not match", reason="Conflict")
        if "deletionTimestamp" not in known["metadata"]:
            known["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self.store(known)
            asyncio.get_running_loop().call_later(self.end_seconds, lambda: self.vanish(place, uid))
        return True

    # What others do.

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    def store(self, item: Object) -> None:
        """Write a pod, and tell of it."""
        self._version = next(self._versions)
        item["metadata"]["resourceVersion"] = str(self._version)
        self.objects[item["metadata"]["namespace"], item["metadata"]["name"]] = item
        self._tell(item, deleted=False)

    def vanish(self, place: Place, uid: str | None = None) -> None:
        """Remove a pod at once."""
        known = self.objects.get(place)
        if known is None or uid not in (None, known["metadata"]["uid"]):
            return
        del self.objects[place]
        self._version = next(self._versions)
        self._tell({**known, "metadata": {**known["metadata"], "resourceVersion": str(self._version)}}, deleted=True)

    def end(self, place: Place, phase: str = "Failed") -> None:
        """A pod's container ends."""
        if (known := self.objects.get(place)) is not None:
            known["status"] = {"phase": phase, "reason": "Evicted", "message": "the node was low on memory"}
            self.store(known)

    def _run(self, place: Place, uid: str) -> None:
        known = self.objects.get(place)
        if known is None or known["metadata"]["uid"] != uid or "deletionTimestamp" in known["metadata"]:
            return
        if _has_ended(known):
            return
        known["status"] = {
            "phase": "Running",
            "podIP": "10.1.2.3",
            "containerStatuses": [{"name": "sandbox", "imageID": "sha256:1", "state": {"running": {"startedAt": ""}}}],
        }
        self.store(known)

    # Watches.

    def watched_by(self, broker: Broker) -> None:
        """List for a broker, and tell it from now on, and no other."""
        self._sink, self._is_broken = broker.pods, False
        self.relist()

    def break_watch(self) -> None:
        """Tell nothing until the next list."""
        self._is_broken = True

    def relist(self) -> None:
        """List everything."""
        assert self._sink is not None
        self._is_broken = False
        items = [copy.deepcopy(item) for item in self.objects.values() if _is_selected(item)]
        self._sink.add_page(PODS, None, items, str(self._version), first=True, last=True)

    def _tell(self, item: Object, *, deleted: bool) -> None:
        if self._sink is None or self._is_broken or not _is_selected(item):
            return
        sink, told = self._sink, copy.deepcopy(item)

        def arrive() -> None:
            if self._sink is sink and not self._is_broken:
                sink.add_event(PODS, told, deleted=deleted)

        asyncio.get_running_loop().call_later(self.watch_delay, arrive)


def lost() -> ApiError:
    """No answer."""
    return Unavailable("the connection was lost", request="create /api/v1/pods")


def broker_of(server: Server, **options: Any) -> Broker:
    """A broker of a server, which has begun."""
    found = Broker(server, clock=asyncio.get_running_loop().time, **options)  # type: ignore[arg-type]
    server.watched_by(found)
    found.begin()
    return found


def _is_selected(pod: Object) -> bool:
    labels = pod["metadata"].get("labels") or {}
    wanted = dict(part.partition("=")[::2] for part in SELECTOR.split(","))
    return all(key in labels and value in ("", labels[key]) for key, value in wanted.items())


def _has_ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")
