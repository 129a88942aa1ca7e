"""Requests to the API server, with deadlines and typed errors; writes only while this operator is the leader."""

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

AnswerCallback = Callable[[str, str, int], None]
"""Callback for every answer: verb, kind, HTTP status (0: none)."""


class Client:
    """A client of one API server; an async context manager.

    Every method raises subclasses of `kube.errors.ApiError`; writes also raise `NotLeader`.

    Args:
        remaining: Seconds until the lease may be lost, in which a write must end; None for no limit.
    """

    def __init__(
        self,
        access: Access,
        *,
        remaining: Callable[[], float | None] = lambda: None,
        on_answer: AnswerCallback = lambda _verb, _kind, _code: None,
        seconds: float = REQUEST_SECONDS,
    ) -> None:
        self._access = access
        self._remaining = remaining
        self._on_answer = on_answer
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = self._access.session()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """An object; None if it does not exist.

        Args:
            namespace: None for cluster-scoped kinds.
        """
        try:
            return await self._request("get", resource, resource.path(namespace, name))
        except NotFound:
            return None

    async def find_resource(self, api_version: str, kind: str) -> tuple[Resource, bool] | None:
        """The resource of any kind, and True if it is namespaced; None if the API server does not serve it."""
        group, _, version = api_version.rpartition("/")
        listing = Resource(group, version, "", kind)
        try:
            found = await self._request("list", listing, f"/{'apis' if group else 'api'}/{api_version}")
        except NotFound:
            return None
        for item in found.get("resources") or ():
            # Subresources have the kinds of others.
            if item.get("kind") == kind and "/" not in str(item.get("name")):
                return listing._replace(plural=str(item["name"])), bool(item.get("namespaced"))
        return None

    async def serves(self, resource: Resource) -> bool:
        """True if the API server serves a kind."""
        try:
            found = await self._request("list", resource, f"/apis/{resource.api_version}")
        except NotFound:
            return False
        return any(item.get("name") == resource.plural for item in found.get("resources") or ())

    async def items(
        self, resource: Resource, namespace: str | None, selector: str = "", *, fields: str = ""
    ) -> AsyncIterator[Object]:
        """All objects that match a label selector and a field selector, page by page."""
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

    async def is_allowed(self, verb: str, resource: Resource, namespace: str, subresource: str | None = None) -> bool:
        """True if this user has a permission in a namespace, or if the API server does not tell."""
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
        """Create an object."""
        resource = resource_of_object(item)
        return await self._write("create", resource, resource.path(item["metadata"]["namespace"]), item)

    async def replace(self, item: Object) -> Object:
        """Replace the object that has the same resource version."""
        resource, metadata = resource_of_object(item), item["metadata"]
        return await self._write("update", resource, resource.path(metadata["namespace"], metadata["name"]), item)

    async def apply(
        self,
        item: Object,
        manager: str,
        *,
        resource: Resource | None = None,
        subresource: str | None = None,
        force: bool = False,
        dry_run: bool = False,
    ) -> Object:
        """Apply an object on the server side; returns the result.

        Args:
            resource: The object's resource; None for one of the operator's own.
            force: True to take fields from other managers; otherwise they raise FieldConflict.
            dry_run: True to have the API server check the object without storing it.
        """
        resource, metadata = resource or resource_of_object(item), item["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"], subresource)
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        query |= {"dryRun": "All"} if dry_run else {}
        return await self._write("patch", resource, path, item, query=query, content=_APPLY)

    async def patch_status(
        self, resource: Resource, namespace: str, name: str, status: Mapping[str, Any], manager: str, *, version: str
    ) -> Object:
        """Change parts of a status by a JSON merge patch, which can also remove fields of other managers.

        Args:
            version: Resource version that the change is based on; raises Conflict at any other.
        """
        body = {"metadata": {"resourceVersion": version}, "status": status}
        path = resource.path(namespace, name, "status")
        return await self._write("patch", resource, path, body, query={"fieldManager": manager}, content=_MERGE)

    async def delete(self, resource: Resource, namespace: str, name: str, *, uid: str) -> bool:
        """Delete the object with this uid, and its dependents in the background; False if it is gone already."""
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
            raise NotLeader(f"{verb} {path}: another operator may hold the lease")
        # A write that is in flight when the lease is lost must end before the next leader's first write.
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
            self._on_answer(verb, resource.kind, code)
        try:
            found = json.loads(received)
        except ValueError:
            found = None
        if code >= 300:
            raise error_of(code, found if isinstance(found, dict) else {}, request, retry_after)
        if not isinstance(found, dict):
            raise Invalid(f"the answer is not a JSON object: {received[:80]!r}", code=code, request=request)
        return found
