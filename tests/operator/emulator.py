"""An API server for tests: objects in memory, lists, watches, server-side apply in the small, and faults on order.

And an event loop whose time is as virtual as its sleeps: nothing waits, everything happens in order.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import selectors
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from kuberoll_operator.console.connection import Connection
from kuberoll_operator.discovery import OPTIONAL
from kuberoll_operator.kube.access import load_access
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.resources import (
    CHILDREN,
    EVENTS,
    LEASES,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    RESOURCE_FLAVORS,
    ROLLOUT_JOBS,
    SECRETS,
    WORKLOAD_PRIORITY_CLASSES,
    Resource,
)
from kuberoll_operator.model import Object

T = TypeVar("T")

RESOURCES = {
    item.plural: item
    for item in (
        *CHILDREN,
        *OPTIONAL.values(),
        PODS,
        EVENTS,
        LEASES,
        PERSISTENT_VOLUME_CLAIMS,
        ROLLOUT_JOBS,
        SECRETS,
        RESOURCE_FLAVORS,
        WORKLOAD_PRIORITY_CLASSES,
    )
}
WRITES = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for.

    Attributes:
        merges: Whether the body is a JSON merge patch.
    """

    method: str
    path: str
    query: dict[str, str]
    body: Any
    merges: bool = False

    @property
    def plural(self) -> str:
        return next((part for part in self.path.split("/") if part in RESOURCES), "")

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and self.path.endswith(self.plural) and "watch" not in self.query


@dataclass(slots=True)
class Fault:
    """An answer instead of what was asked for.

    Attributes:
        meant: Which requests.
        status: 0: the connection is closed without an answer.
        times: How often; None: until it is mended.
        after: The request is carried out, and its answer lost.
    """

    meant: Callable[[Request], bool]
    status: int
    body: Object = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    times: int | None = 1
    after: bool = False


class Emulator:
    """The API server; every request is kept in `requests`.

    Attributes:
        serves: Kinds of others that are served.
        logs: Lines of pods' containers, each with its time; of their predecessors by `CONTAINER previous`.
        open_logs: Those of containers that run, and may say more.
        pages: What pods answer through the API server, by `POD:PORT` and path.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.url = ""
        self.serves: set[Resource] = set()
        self.logs: dict[tuple[str, str], list[str]] = {}
        self.open_logs: set[tuple[str, str]] = set()
        self.pages: dict[tuple[str, str], str] = {}
        self._objects: dict[tuple[Resource, str, str], Object] = {}
        self._versions = itertools.count(1)
        self._version = 0
        self._watchers: dict[asyncio.Queue[tuple[str, Object] | None], tuple[Resource, str | None, str]] = {}
        self._changed = asyncio.Event()

    def put(self, item: Object) -> Object:
        """Writes an object as others than the operator do; status and all."""
        resource = next(found for found in RESOURCES.values() if found.kind == item["kind"])
        return self._store(resource, copy.deepcopy(item))

    def remove(self, plural: str, namespace: str, name: str, *, unseen: bool = False) -> None:
        """Deletes an object; `unseen`: so that no watch tells of it."""
        self._delete((RESOURCES[plural], namespace, name), tell=not unseen)

    def get(self, plural: str, namespace: str, name: str) -> Object | None:
        """An object, or nothing."""
        return copy.deepcopy(self._objects.get((RESOURCES[plural], namespace, name)))

    def all(self, plural: str) -> list[Object]:
        """All objects of a kind."""
        return [copy.deepcopy(item) for place, item in self._objects.items() if place[0].plural == plural]

    def writes(self, plural: str | None = None) -> list[Request]:
        """The writes that there were."""
        return [item for item in self.requests if item.method in WRITES and plural in (None, item.plural)]

    def end_watches(self, *, gone: bool) -> None:
        """Ends all watches, as a restart does; `gone`: with 410, so that whoever watches lists again."""
        for queue in list(self._watchers):
            if gone:
                queue.put_nowait(("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"}))
            queue.put_nowait(None)

    def fail_watch(self, plural: str, code: int) -> None:
        """An error in the stream of the watches of a kind."""
        for queue, (resource, _, _) in self._watchers.items():
            if resource.plural == plural:
                queue.put_nowait(("ERROR", {"kind": "Status", "code": code, "reason": "InternalError"}))

    async def until(self, condition: Callable[[], T | None]) -> T:
        """What a condition gives, as soon as that is something; looked at after every request and change."""
        while not (found := condition()):
            self._changed.clear()
            await self._changed.wait()
        return found

    @asynccontextmanager
    async def running(self, directory: Path) -> AsyncIterator[Path]:
        """Serves; gives a kubeconfig."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        file = directory / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "e", "cluster": {"server": self.url}}],
            "users": [{"name": "e", "user": {"token": "secret"}}],
            "contexts": [{"name": "e", "context": {"cluster": "e", "user": "e"}}],
            "current-context": "e",
        }
        file.write_text(json.dumps(config))
        try:
            yield file
        finally:
            self.end_watches(gone=False)
            await runner.cleanup()

    @asynccontextmanager
    async def connected(self, directory: Path) -> AsyncIterator[Connection]:
        """Serves; gives a command's connection."""
        async with self.running(directory) as file, Client(access := await load_access(file)) as client:
            yield Connection(access, client)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        body = json.loads(text) if text else None
        merges = request.content_type == "application/merge-patch+json"
        asked = Request(request.method, request.path, dict(request.query), body, merges)
        self.requests.append(asked)
        try:
            return await self._faulty(request, asked)
        finally:
            self._changed.set()

    async def _faulty(self, request: web.Request, asked: Request) -> web.StreamResponse:
        fault = next((item for item in self.faults if item.times != 0 and item.meant(asked)), None)
        if fault is None:
            return await self._carry_out(request, asked)
        if fault.times is not None:
            fault.times -= 1
        if fault.after:
            await self._carry_out(request, asked)
        if fault.status == 0:
            assert request.transport is not None
            request.transport.abort()
        return _status(fault.status or 500, fault.body, fault.headers)

    async def _carry_out(self, request: web.Request, asked: Request) -> web.StreamResponse:
        parts = asked.path.strip("/").split("/")
        if not asked.plural:
            return _discovery(parts, self.serves)
        resource = RESOURCES[asked.plural]
        rest = parts[parts.index(asked.plural) + 1 :]
        namespace = parts[parts.index("namespaces") + 1] if "namespaces" in parts else None
        if not rest and asked.method == "GET":
            selector = asked.query.get("labelSelector", "")
            if "watch" in asked.query:
                return await self._watch(request, resource, namespace, selector)
            return self._list(resource, namespace, selector, asked.query.get("fieldSelector", ""))
        # What is of the whole cluster is kept under no namespace.
        namespace = namespace or ""
        if rest[1:] == ["log"]:
            return await self._log(request, rest[0])
        if rest[1:2] == ["proxy"]:
            page = self.pages.get((rest[0], "/".join(rest[2:])))
            return _status(503, {"reason": "ServiceUnavailable"}) if page is None else web.Response(text=page)
        name = rest[0] if rest else asked.body["metadata"]["name"]
        place, known = (resource, namespace, name), self._objects.get((resource, namespace, name))
        if asked.method == "GET" and known is None:
            return _status(404, {"reason": "NotFound"})
        if asked.method == "GET":
            return web.json_response(known)
        if asked.method == "DELETE":
            return self._remove(place, known, asked)
        return self._write(place, known, asked, status=rest[1:] == ["status"])

    def _remove(self, place: tuple[Resource, str, str], known: Object | None, asked: Request) -> web.Response:
        if known is None:
            return _status(404, {"reason": "NotFound"})
        uid = ((asked.body or {}).get("preconditions") or {}).get("uid", known["metadata"]["uid"])
        if uid != known["metadata"]["uid"]:
            return _status(409, {"reason": "Conflict", "message": "the UID in the precondition does not match"})
        self._delete(place)
        return web.json_response({"kind": "Status", "status": "Success"})

    def _write(
        self, place: tuple[Resource, str, str], known: Object | None, asked: Request, *, status: bool
    ) -> web.Response:
        body, metadata = asked.body, asked.body["metadata"]
        if asked.method == "POST" and known is not None:
            return _status(409, {"reason": "AlreadyExists"})
        if asked.method == "PUT" and known is None:
            return _status(404, {"reason": "NotFound"})
        if known is not None:
            for key in ("resourceVersion", "uid"):
                if metadata.get(key, known["metadata"][key]) != known["metadata"][key]:
                    return _status(409, {"reason": "Conflict", "message": f"the {key} does not match"})
        if status:
            if known is None:
                return _status(404, {"reason": "NotFound"})
            if asked.merges:
                item = {**known, "status": _merged(known.get("status") or {}, body["status"])}
                return web.json_response(self._store(place[0], item))
            item = {**known, "status": body["status"]}
        else:
            kept = {} if known is None or "status" not in known else {"status": known["status"]}
            item = {**body, **kept, "metadata": {**metadata, "namespace": place[1], "name": place[2]}}
        return web.json_response(self._store(place[0], item), status=201 if known is None else 200)

    def _store(self, resource: Resource, item: Object) -> Object:
        place = (resource, item["metadata"].get("namespace", ""), item["metadata"]["name"])
        known = self._objects.get(place)
        before = known["metadata"] if known else {}
        generation = before.get("generation", 1)
        if known is not None and _bare(known) == _bare(item):
            return known
        if known is not None and known.get("spec") != item.get("spec"):
            generation += 1
        self._version = next(self._versions)
        item["metadata"] = {
            "creationTimestamp": before.get("creationTimestamp", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")),
            "uid": before.get("uid", str(uuid.uuid4())),
            **item["metadata"],
            "resourceVersion": str(self._version),
            "generation": generation,
        }
        self._objects[place] = item
        self._tell("ADDED" if known is None else "MODIFIED", resource, item)
        return item

    def _delete(self, place: tuple[Resource, str, str], *, tell: bool = True) -> None:
        item = self._objects.pop(place)
        self._version = next(self._versions)
        if tell:
            last = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self._version)}}
            self._tell("DELETED", place[0], last)
        # As the garbage collector does.
        for other, owned in list(self._objects.items()):
            owners = owned["metadata"].get("ownerReferences") or ()
            if any(owner["uid"] == item["metadata"]["uid"] for owner in owners):
                self._delete(other, tell=tell)

    def _tell(self, kind: str, resource: Resource, item: Object) -> None:
        self._changed.set()
        for queue, (watched, namespace, selector) in self._watchers.items():
            if (
                watched == resource
                and namespace in (None, item["metadata"].get("namespace"))
                and _selects(selector, item)
            ):
                queue.put_nowait((kind, copy.deepcopy(item)))

    def _list(self, resource: Resource, namespace: str | None, selector: str, fields: str) -> web.Response:
        items = [
            item
            for place, item in self._objects.items()
            if place[0] == resource
            and namespace in (None, place[1])
            and _selects(selector, item)
            and all(_has_field(part, item) for part in filter(None, fields.split(",")))
        ]
        metadata = {"resourceVersion": str(self._version)}
        head = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version}
        return web.json_response({**head, "metadata": metadata, "items": items})

    async def _watch(
        self, request: web.Request, resource: Resource, namespace: str | None, selector: str
    ) -> web.StreamResponse:
        queue: asyncio.Queue[tuple[str, Object] | None] = asyncio.Queue()
        self._watchers[queue] = (resource, namespace, selector)
        response = web.StreamResponse()
        try:
            # What changed between the list and now.
            since = int(request.query.get("resourceVersion") or 0)
            for place, item in self._objects.items():
                newer = int(item["metadata"]["resourceVersion"]) > since
                if place[0] == resource and namespace in (None, place[1]) and newer and _selects(selector, item):
                    queue.put_nowait(("MODIFIED", copy.deepcopy(item)))
            await response.prepare(request)
            self._changed.set()
            while (event := await queue.get()) is not None:
                line = json.dumps({"type": event[0], "object": event[1]})
                await response.write(line.encode() + b"\n")
        except ConnectionError:
            pass
        finally:
            del self._watchers[queue]
        return response

    def log(self, pod: str, container: str, line: str) -> None:
        """A container writes a line."""
        self.logs.setdefault((pod, container), []).append(line)
        self._changed.set()

    def end_log(self, pod: str, container: str) -> None:
        """A container ends."""
        self.open_logs.discard((pod, container))
        self._changed.set()

    async def _log(self, request: web.Request, pod: str) -> web.StreamResponse:
        query = request.query
        key = (pod, query["container"] + (" previous" if "previous" in query else ""))
        if key not in self.logs:
            return _status(400, {"reason": "BadRequest", "message": "no such log"})
        response = web.StreamResponse()
        await response.prepare(request)
        # The API server takes whole seconds.
        told = [line for line in self.logs[key] if line[:19] >= query.get("sinceTime", "")[:19]]
        if "tailLines" in query:
            told = told[-int(query["tailLines"]) :] if int(query["tailLines"]) else []
        count = len(self.logs[key])
        await response.write("".join(f"{line}\n" for line in told).encode())
        while "follow" in query:
            lines = self.logs[key][count:]
            count += len(lines)
            await response.write("".join(f"{line}\n" for line in lines).encode())
            if not lines:
                if key not in self.open_logs:
                    break
                self._changed.clear()
                await self._changed.wait()
        return response

    def watching(self) -> set[str]:
        """Kinds that are being watched."""
        return {resource.plural for resource, _, _ in self._watchers.values()}


def _merged(known: Object, patch: Object) -> Object:
    """RFC 7386."""
    found = {key: value for key, value in known.items() if patch.get(key, value) is not None}
    for key, value in patch.items():
        if value is not None:
            before = found.get(key)
            found[key] = (
                _merged(before if isinstance(before, dict) else {}, value) if isinstance(value, dict) else value
            )
    return found


def _bare(item: Object) -> Object:
    given = {"creationTimestamp", "uid", "resourceVersion", "generation"}
    return {**item, "metadata": {key: value for key, value in item["metadata"].items() if key not in given}}


def _selects(selector: str, item: Object) -> bool:
    labels = item["metadata"].get("labels") or {}
    for part in filter(None, selector.split(",")):
        key, _, value = part.partition("=")
        if key not in labels or (value and labels[key] != value):
            return False
    return True


def _has_field(wanted: str, item: Object) -> bool:
    path, _, value = wanted.partition("=")
    found: Any = item
    for key in path.split("."):
        found = found.get(key, "") if isinstance(found, dict) else ""
    return bool(found == value)


def _status(code: int, body: Object, headers: dict[str, str] | None = None) -> web.Response:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, **body}
    return web.json_response(status, status=code, headers=headers)


def _discovery(parts: list[str], serves: set[Resource]) -> web.Response:
    known = [item for item in RESOURCES.values() if item in serves or item not in OPTIONAL.values()]
    served = {item.api_version for item in known} | {"apiextensions.k8s.io/v1"}
    if parts == ["api"]:
        return web.json_response({"versions": ["v1"]})
    if parts == ["apis"]:
        groups = [
            {
                "name": item.split("/")[0],
                "versions": [{"groupVersion": item, "version": item.split("/")[1]}],
                "preferredVersion": {"groupVersion": item, "version": item.split("/")[1]},
            }
            for item in sorted(served)
            if "/" in item
        ]
        return web.json_response({"groups": groups})
    version = "/".join(parts[1:])
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {"name": item.plural, "kind": item.kind, "singularName": "", "namespaced": True, "verbs": verbs}
        for item in known
        if item.api_version == version
    ]
    if version != "v1" and version not in served:
        return _status(404, {"reason": "NotFound"})
    # kopf waits until it has found these, whether or not it looks at them.
    for plural, kind, home in (
        ("namespaces", "Namespace", "v1"),
        ("customresourcedefinitions", "CustomResourceDefinition", "apiextensions.k8s.io/v1"),
    ):
        if home == version:
            resources.append({"name": plural, "kind": kind, "singularName": "", "namespaced": False, "verbs": verbs})
    return web.json_response({"groupVersion": version, "resources": resources})


class _NoWait(selectors.DefaultSelector):
    """A selector that, instead of waiting, has the time pass."""

    elapsed = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if (ready := super().select(0)) or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("everything waits for something that nothing will do")
        self.elapsed += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer; for code without sockets."""

    def __init__(self) -> None:
        self._passing = _NoWait()
        super().__init__(self._passing)

    def time(self) -> float:
        return float(self._passing.elapsed)


def in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """What a coroutine gives, however long it sleeps."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
