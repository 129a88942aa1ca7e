"""Server-side apply of a manifest's objects as a user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kuberoll_operator.console.errors import ConsoleError
from kuberoll_operator.console.shipping import MANAGER, owned_by
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import FieldConflict
from kuberoll_operator.kube.resources import ROLLOUT_JOBS, Resource, resource_of_object
from kuberoll_operator.model import Object


@dataclass(frozen=True, slots=True, kw_only=True)
class JobObjects:
    """Objects of one job.

    Attributes:
        job: The RolloutJob.
        files: ConfigMap of the files beside the manifest; None if it needs none.
        contents: Names and size of these files, for people.
    """

    job: Object
    files: Object | None = None
    contents: str = ""


class Applied(NamedTuple):
    """An object as the API server returned it."""

    live: Object
    outcome: Literal["created", "changed", "unchanged"]

    def __str__(self) -> str:
        """`configmap/prompts created`, as kubectl has it."""
        return f"{self.live['kind'].lower()}/{self.live['metadata']['name']} {self.outcome}"


class Applying:
    """Applies objects.

    Args:
        force: Take over fields that others manage.
        dry_run: Have everything checked, and store nothing.
    """

    def __init__(self, client: Client, *, force: bool, dry_run: bool) -> None:
        self._client, self._force, self._dry_run = client, force, dry_run

    async def apply_others(self, items: Sequence[Object], namespace: str) -> list[Applied]:
        """Apply objects of other kinds.

        Raises:
            ApiError: The API server rejected one.
            ConsoleError: It does not know the kind of one, or fields of one belong to others.
        """
        return [await self._apply(*await self._placed(item, namespace)) for item in items]

    async def apply_jobs(self, jobs: Sequence[JobObjects]) -> list[tuple[JobObjects, list[Applied]]]:
        """Apply jobs and their files, after a check of all of them by the API server.

        A job comes before its files, which it owns; its first pod waits for them.

        Raises:
            ApiError: The API server rejected one.
            ConsoleError: It has no RolloutJobs, or fields of one belong to others.
        """
        if not await self._client.serves(ROLLOUT_JOBS):
            raise ConsoleError(
                "the cluster has no RolloutJobs: install KubeRoll's chart (docs/tutorials/quickstart-kubernetes.md)",
                code=2,
            )
        rehearsal = Applying(self._client, force=self._force, dry_run=True)
        for item in jobs:
            for wanted in filter(None, (item.job, item.files)):
                await rehearsal._apply(resource_of_object(wanted), wanted)
        found = []
        for item in jobs:
            job = await self._apply(ROLLOUT_JOBS, item.job)
            written = [job]
            if item.files is not None:
                files = item.files if self._dry_run else owned_by(item.files, job.live)
                written.append(await self._apply(resource_of_object(files), files))
            found.append((item, written))
        return found

    async def _placed(self, item: Object, namespace: str) -> tuple[Resource, Object]:
        """The resource of an object, and the object in its namespace."""
        metadata: dict[str, Any] = item.get("metadata") or {}
        place = f"{item['kind']} {metadata.get('name', '(without a name)')}"
        if not metadata.get("name"):
            raise ConsoleError(f"{place}: metadata.name: missing", code=2)
        served = await self._client.find_resource(item["apiVersion"], item["kind"])
        if served is None:
            raise ConsoleError(f"{place}: the cluster does not serve {item['apiVersion']} {item['kind']}", code=2)
        resource, namespaced = served
        if not namespaced:
            return resource, item
        if metadata.get("namespace") not in {None, namespace}:
            raise ConsoleError(
                f"{place}: metadata.namespace: found {metadata['namespace']}, but all else goes into {namespace}; "
                "remove it, or put the object into a separate file",
                code=2,
            )
        return resource, {**item, "metadata": {**metadata, "namespace": namespace}}

    async def _apply(self, resource: Resource, item: Object) -> Applied:
        metadata = item["metadata"]
        before = await self._client.get(resource, metadata.get("namespace"), metadata["name"])
        try:
            live = await self._client.apply(item, MANAGER, resource=resource, force=self._force, dry_run=self._dry_run)
        except FieldConflict as error:
            managers = ", ".join(error.managers) or "others"
            raise ConsoleError(
                f"{item['kind']} {metadata['name']}: fields that the manifest sets are managed by {managers}; use "
                f"--force-conflicts to take them over, or remove them from the manifest: {error.message}"
            ) from error
        if before is None:
            return Applied(live, "created")
        same = before["metadata"].get("resourceVersion") == live["metadata"].get("resourceVersion")
        return Applied(live, "unchanged" if same else "changed")
