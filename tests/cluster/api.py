"""A small client of the API server for the test kubelet, the tests and the benchmark: plain JSON in, plain JSON out."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp

Object = dict[str, Any]
PatchKind = Literal["merge", "strategic-merge", "apply", "json"]

_PLURALS = {
    "ClusterRole": "rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "rbac.authorization.k8s.io/v1/clusterrolebindings",
    "ConfigMap": "v1/configmaps",
    "CustomResourceDefinition": "apiextensions.k8s.io/v1/customresourcedefinitions",
    "Deployment": "apps/v1/deployments",
    "Event": "events.k8s.io/v1/events",
    "Job": "batch/v1/jobs",
    "Lease": "coordination.k8s.io/v1/leases",
    "Namespace": "v1/namespaces",
    "NetworkPolicy": "networking.k8s.io/v1/networkpolicies",
    "Node": "v1/nodes",
    "PersistentVolumeClaim": "v1/persistentvolumeclaims",
    "Pod": "v1/pods",
    "PodDisruptionBudget": "policy/v1/poddisruptionbudgets",
    "ReplicaSet": "apps/v1/replicasets",
    "ResourceQuota": "v1/resourcequotas",
    "Role": "rbac.authorization.k8s.io/v1/roles",
    "RoleBinding": "rbac.authorization.k8s.io/v1/rolebindings",
    "RolloutJob": "kuberoll.io/v1alpha1/rolloutjobs",
    "SandboxClaim": "extensions.agents.x-k8s.io/v1beta1/sandboxclaims",
    "SandboxTemplate": "extensions.agents.x-k8s.io/v1beta1/sandboxtemplates",
    "SandboxWarmPool": "extensions.agents.x-k8s.io/v1beta1/sandboxwarmpools",
    "Secret": "v1/secrets",
    "Service": "v1/services",
    "ServiceAccount": "v1/serviceaccounts",
    "Workload": "kueue.x-k8s.io/v1beta2/workloads",
}


class ApiError(Exception):
    """The API server refused.

    Attributes:
        status: The HTTP status.
        reason: The reason of the answer's Status object: NotFound, Conflict, Invalid, Forbidden, ...
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


def path_of(kind: str, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
    """Where objects of a kind are: `/apis/batch/v1/namespaces/NAMESPACE/jobs/NAME`."""
    version, plural = _PLURALS[kind].rsplit("/", 1)
    root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    parts = [root, *(["namespaces", namespace] if namespace else []), plural, name, subresource]
    return "/".join(part for part in parts if part)


class Api:
    """One user's session with an API server.

    Errors: every call raises `ApiError` when the server refuses and `aiohttp.ClientError` when it cannot be reached.
    """

    def __init__(self, url: str, token: str, authority: Path | None = None) -> None:
        self._url, self._token = url, token
        self._context = ssl.create_default_context(cafile=str(authority)) if authority else None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}", "Accept": "application/json"},
            connector=aiohttp.TCPConnector(ssl=self._context or True, limit=0),
            timeout=aiohttp.ClientTimeout(total=60),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        parameters: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """One call; returns the object of the answer."""
        assert self._session is not None
        async with self._session.request(
            method,
            self._url + path,
            data=None if body is None else json.dumps(body),
            params=parameters,
            headers={"Content-Type": content_type},
        ) as answer:
            text = await answer.text()
            try:
                decoded: Object = json.loads(text)
            except ValueError:
                decoded = {"message": text}
            if answer.status >= 400:
                raise ApiError(answer.status, decoded.get("reason", ""), decoded.get("message", text))
            return decoded

    async def get(self, kind: str, namespace: str | None, name: str) -> Object:
        return await self.request("GET", path_of(kind, namespace, name))

    async def find(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """The object, or None where there is none."""
        try:
            return await self.get(kind, namespace, name)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, kind: str, namespace: str | None = None, labels: str | None = None) -> list[Object]:
        parameters = {"labelSelector": labels} if labels else None
        items: list[Object] = (await self.request("GET", path_of(kind, namespace), parameters=parameters))["items"]
        return items

    async def create(self, item: Object) -> Object:
        return await self.request("POST", path_of(item["kind"], item["metadata"].get("namespace")), item)

    async def patch(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        body: Any,
        *,
        subresource: str | None = None,
        how: PatchKind = "merge",
        manager: str = "kuberoll-tests",
    ) -> Object:
        suffix = "yaml" if how == "apply" else "json"
        parameters = {"fieldManager": manager} | ({"force": "true"} if how == "apply" else {})
        return await self.request(
            "PATCH",
            path_of(kind, namespace, name, subresource),
            body,
            parameters=parameters,
            content_type=f"application/{how}-patch+{suffix}",
        )

    async def apply(self, item: Object) -> Object:
        """Server-side apply, conflicts overridden."""
        metadata = item["metadata"]
        return await self.patch(item["kind"], metadata.get("namespace"), metadata["name"], item, how="apply")

    async def delete(
        self, kind: str, namespace: str | None, name: str, *, grace: int | None = None, uid: str | None = None
    ) -> None:
        """In the background of its dependents; nothing when it is not there."""
        options: Object = {"propagationPolicy": "Background"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            await self.request("DELETE", path_of(kind, namespace, name), options)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def changes(
        self, kind: str, namespace: str | None = None, labels: str | None = None
    ) -> AsyncIterator[tuple[str, Object]]:
        """Everything there is as ("SYNC", list), then each change: ADDED, MODIFIED or DELETED, and the object.

        It begins anew, with another SYNC, whenever the server ends the watch with an error.
        """
        assert self._session is not None
        selector = {"labelSelector": labels} if labels else {}
        while True:
            listed = await self.request("GET", path_of(kind, namespace), parameters=selector)
            yield "SYNC", listed
            version = listed["metadata"]["resourceVersion"]
            ended = False
            while not ended:
                parameters = selector | {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
                try:
                    async with self._session.get(
                        self._url + path_of(kind, namespace),
                        params=parameters,
                        timeout=aiohttp.ClientTimeout(total=None, sock_read=None),
                        # A pod's status fits; the default of 64 KiB a line does not hold every object.
                        read_bufsize=4 << 20,
                    ) as answer:
                        if answer.status >= 400:
                            break
                        async for line in answer.content:
                            event = json.loads(line)
                            if event["type"] == "ERROR":
                                ended = True
                                break
                            version = event["object"]["metadata"]["resourceVersion"]
                            if event["type"] != "BOOKMARK":
                                yield event["type"], event["object"]
                except (aiohttp.ClientError, TimeoutError):
                    await asyncio.sleep(0.2)

    async def wait(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        until: Callable[[Object | None], bool],
        *,
        seconds: float = 60.0,
        why: str = "",
    ) -> Object | None:
        """The object as soon as `until` says so of it; None stands for its absence.

        Raises:
            AssertionError: It did not come to that in time; with its last state.
        """
        last: Object | None = None
        try:
            async with asyncio.timeout(seconds):
                parameters = {"fieldSelector": f"metadata.name={name}"}
                while True:
                    listed = await self.request("GET", path_of(kind, namespace), parameters=parameters)
                    last = listed["items"][0] if listed["items"] else None
                    if until(last):
                        return last
                    async for last in self._watch_one(kind, namespace, parameters, listed):
                        if until(last):
                            return last
        except TimeoutError:
            state = "absent" if last is None else json.dumps(last.get("status"), indent=1)
            what = f"{kind} {namespace}/{name}{' ' + why if why else ''}"
            raise AssertionError(f"{what}: not within {seconds:.0f} s; it is {state}") from None

    async def _watch_one(
        self, kind: str, namespace: str | None, parameters: Mapping[str, str], listed: Object
    ) -> AsyncIterator[Object | None]:
        assert self._session is not None
        version = listed["metadata"]["resourceVersion"]
        async with self._session.get(
            self._url + path_of(kind, namespace),
            params={**parameters, "watch": "1", "resourceVersion": version},
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=4 << 20,
        ) as answer:
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield None if event["type"] == "DELETED" else event["object"]


def condition(item: Object | None, kind: str) -> Object | None:
    """A condition of an object's status, if it has it."""
    conditions = ((item or {}).get("status") or {}).get("conditions") or ()
    return next((found for found in conditions if found["type"] == kind), None)


def is_true(item: Object | None, kind: str) -> bool:
    """Whether a condition is True."""
    return (condition(item, kind) or {}).get("status") == "True"
