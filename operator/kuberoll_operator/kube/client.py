"""Requests to the API server, each with a deadline, errors as types, and writes only while one may write."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Self

import aiohttp

from kuberoll_operator.kube.access import Access
from kuberoll_operator.kube.errors import Forbidden, Invalid, NotFound, NotLeader, Unavailable, error_of
from kuberoll_operator.kube.resources import Resource, resource_of_object
from kuberoll_operator.model import Object

REQUEST_SECONDS = 30.0
CONNECT_SECONDS = 5.0
PAGE = 500

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON = "application/json"
_REVIEWS = Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview")

Told = Callable[[str, str, int], None]
"""Told of every answer: verb, kind, HTTP status (0: none)."""


class Client:
    """A client of one API server; an async context manager.

    Every method raises `kube.errors.ApiError`'s subclasses, and writes raise `NotLeader`.

    Args:
        remaining: Seconds in which a write must have ended, because the lease may be lost then; None: no limit.
    """

    def __init__(
        self,
        access: Access,
        *,
        remaining: Callable[[], float | None] = lambda: None,
        told: Told = lambda _verb, _kind, _code: None,
        seconds: float = REQUEST_SECONDS,
    ) -> None:
        self._access = access
        self._remaining = remaining
        self._told = told
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = self._access.session()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """An object; None where there is none.

        Args:
            namespace: None: the kind is of the whole cluster.
        """
        try:
            return await self._request("get", resource, resource.path(namespace, name))
        except NotFound:
            return None

    async def serves(self, resource: Resource) -> bool:
        """Whether the API server knows a kind."""
        try:
            found = await self._request("list", resource, f"/apis/{resource.api_version}")
        except NotFound:
            return False
        return any(item.get("name") == resource.plural for item in found.get("resources") or ())

    async def items(
        self, resource: Resource, namespace: str | None, selector: str = "", *, fields: str = ""
    ) -> AsyncIterator[Object]:
        """All objects that a label selector and a field selector select, page by page."""
        query = {"limit": str(PAGE)}
        query |= ({"labelSelector": selector} if selector else {}) | ({"fieldSelector": fields} if fields else {})
        while True:
            page = await self._request("list", resource, resource.path(namespace), query=query)
            for item in page.get("items") or ():
                yield {"apiVersion": resource.api_version, "kind": resource.kind, **item}
            token = page.get("metadata", {}).get("continue")
            if not token:
                return
            query["continue"] = token

    async def may(self, verb: str, resource: Resource, namespace: str, subresource: str | None = None) -> bool:
        """Whether this user has a right in a namespace, as far as the API server says; if it does not, they may try."""
        attributes = {"namespace": namespace, "verb": verb, "group": resource.group, "resource": resource.plural}
        attributes |= {"subresource": subresource} if subresource else {}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": _REVIEWS.kind,
            "spec": {"resourceAttributes": attributes},
        }
        try:
            found = await self._request("create", _REVIEWS, _REVIEWS.path(None), body=review)
        except (Forbidden, NotFound):
            return True
        return bool(found.get("status", {}).get("allowed"))

    async def create(self, item: Object) -> Object:
        """A new object."""
        resource = resource_of_object(item)
        return await self._write("create", resource, resource.path(item["metadata"]["namespace"]), item)

    async def replace(self, item: Object) -> Object:
        """An object in place of the one with its resource version."""
        resource, metadata = resource_of_object(item), item["metadata"]
        return await self._write("update", resource, resource.path(metadata["namespace"], metadata["name"]), item)

    async def apply(self, item: Object, manager: str, *, subresource: str | None = None, force: bool = False) -> Object:
        """Server-side apply; the answer is the object as it is now.

        Args:
            force: Whether fields that others manage are taken from them; else they are a FieldConflict.
        """
        resource, metadata = resource_of_object(item), item["metadata"]
        path = resource.path(metadata["namespace"], metadata["name"], subresource)
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        return await self._write("patch", resource, path, item, query=query, content=_APPLY)

    async def patch_status(
        self, resource: Resource, namespace: str, name: str, status: Mapping[str, Any], manager: str, *, version: str
    ) -> Object:
        """Changes some of a status by a JSON merge patch, which can remove what others have set.

        Args:
            version: The resource version that the change was decided by; another one is a Conflict.
        """
        body = {"metadata": {"resourceVersion": version}, "status": status}
        path = resource.path(namespace, name, "status")
        return await self._write("patch", resource, path, body, query={"fieldManager": manager}, content=_MERGE)

    async def delete(self, resource: Resource, namespace: str, name: str, *, uid: str) -> bool:
        """Deletes the object with this uid, what it owns in the background; False where it is gone already."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        try:
            await self._write("delete", resource, resource.path(namespace, name), options)
        except NotFound:
            return False
        return True

    async def _write(
        self,
        verb: str,
        resource: Resource,
        path: str,
        body: Object,
        *,
        query: Mapping[str, str] | None = None,
        content: str = _JSON,
    ) -> Object:
        remaining = self._remaining()
        if remaining is not None and remaining <= 0:
            raise NotLeader(f"{verb} {path}: the lease may be another's")
        # What is under way when the lease is lost must not come after the next leader's first write.
        seconds = self._seconds if remaining is None else min(self._seconds, remaining)
        return await self._request(verb, resource, path, body=body, query=query, content=content, seconds=seconds)

    async def _request(
        self,
        verb: str,
        resource: Resource,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = _JSON,
        seconds: float | None = None,
    ) -> Object:
        assert self._session is not None, "the client is not entered"
        method = {"get": "GET", "list": "GET", "create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}
        request, code = f"{verb} {path}", 0
        total = self._seconds if seconds is None else seconds
        try:
            async with self._session.request(
                method[verb],
                self._access.server + path,
                params=query,
                data=None if body is None else json.dumps(body, ensure_ascii=False).encode(),
                headers={"Content-Type": content, "Accept": _JSON},
                timeout=aiohttp.ClientTimeout(total=total, sock_connect=min(CONNECT_SECONDS, total)),
            ) as answer:
                code = answer.status
                received = await answer.read()
                retry_after = answer.headers.get("Retry-After")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(str(error) or type(error).__name__, request=request) from error
        finally:
            self._told(verb, resource.kind, code)
        try:
            found = json.loads(received)
        except ValueError:
            found = None
        if code >= 300:
            raise error_of(code, found if isinstance(found, dict) else {}, request, retry_after)
        if not isinstance(found, dict):
            raise Invalid(f"the answer is no JSON object: {received[:80]!r}", code=code, request=request)
        return found
