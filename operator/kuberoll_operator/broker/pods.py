"""Pods of sandboxes, as the watch tells of them: cut down to what the broker decides by."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from kuberoll_api.sandboxes import SandboxAnswer
from kuberoll_operator import names
from kuberoll_operator.broker.states import answer_of, image_of, user_of, waits_for_a_node
from kuberoll_operator.cache import Scope, version_of
from kuberoll_operator.kube.resources import Resource
from kuberoll_operator.model import Key, Object
from kuberoll_operator.sandbox_pod import LEASE_ANNOTATION, PodContext

SELECTOR: Final = f"app.kubernetes.io/managed-by={names.BROKER},{names.SANDBOX_JOB_LABEL}"
_LEASE_SECONDS: Final = 60.0

PodKey = tuple[str, str]
"""Namespace and name of a pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPod:
    """A sandbox's pod.

    Attributes:
        job: Its job.
        worker: The worker that has it.
        answer: Its state.
        image_id: Which image its main container runs, as its node names it; None: it is not known yet.
        waits_for_a_node: True if no node has room for it.
        user: Whom that image's commands run as, if the pod has found that out.
        lease_seconds: It is removed when its worker has not been heard of for so long.
        leaving: True if it is being deleted.
        since: When the broker first saw it, in seconds of the broker's clock.
    """

    uid: str
    job: Key
    worker: str
    answer: SandboxAnswer
    image_id: str | None
    user: str | None
    waits_for_a_node: bool
    lease_seconds: float
    leaving: bool
    since: float
    version: int


class SandboxPods:
    """The latest known state of all pods of sandboxes.

    Args:
        changed: Called with the key of a pod that has changed, or is gone.
    """

    def __init__(self, changed: Callable[[PodKey], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._changed, self._clock = changed, clock
        self._pods: dict[PodKey, SandboxPod] = {}
        self._listed: dict[Scope, int] = {}
        self._told: dict[Scope, int] = {}
        self._pages: dict[Scope, set[PodKey]] = {}

    def get(self, key: PodKey) -> SandboxPod | None:
        """A pod; None if there is none."""
        return self._pods.get(key)

    def all(self) -> list[tuple[PodKey, SandboxPod]]:
        """All of them."""
        return list(self._pods.items())

    def add_page(
        self,
        resource: Resource,  # noqa: ARG002 - pods are all that is watched
        scope: Scope,
        items: Iterable[Object],
        version: str,
        *,
        last: bool,
        first: bool = True,
    ) -> None:
        """See `watches.Sink`."""
        listed = version_of({"metadata": {"resourceVersion": version}})
        if first:
            self._pages[scope] = set()
            if listed < max(self._listed.get(scope, -1), self._told.get(scope, -1)):
                self._rewind(scope)
        seen = self._pages.setdefault(scope, set())
        for item in items:
            seen.add(_key(item))
            self.put(item)
        if not last:
            return
        del self._pages[scope]
        self._listed[scope] = listed
        for key, pod in self.all():
            # A newer version was written by this broker after the list was made.
            if scope in (None, key[0]) and key not in seen and pod.version <= listed:
                self._drop(key)

    def add_event(self, resource: Resource, item: Object, *, deleted: bool) -> None:  # noqa: ARG002
        """See `watches.Sink`."""
        key = _key(item)
        known = self._pods.get(key)
        for scope in (None, key[0]):
            self._told[scope] = max(version_of(item), self._told.get(scope, -1))
        if deleted:
            if known is not None and known.uid == item["metadata"]["uid"]:
                self._drop(key)
        elif known is not None or version_of(item) > max(self._listed.get(None, -1), self._listed.get(key[0], -1)):
            # An unknown one that is older than the list has been deleted since.
            self.put(item)

    def synced(self, resource: Resource, scope: Scope) -> bool:  # noqa: ARG002
        """See `watches.Sink`."""
        return scope in self._listed

    def put(self, item: Object) -> None:
        """Note a pod as the API server has told of it."""
        key, metadata = _key(item), item["metadata"]
        known, version = self._pods.get(key), version_of(item)
        if known is not None and known.uid == metadata["uid"] and known.version >= version:
            return
        labels = metadata.get("labels") or {}
        self._pods[key] = SandboxPod(
            uid=metadata["uid"],
            job=Key(key[0], labels.get(names.SANDBOX_JOB_LABEL, "")),
            worker=labels.get(names.SANDBOX_WORKER_LABEL, ""),
            answer=answer_of(item),
            image_id=image_of(item),
            user=user_of(item),
            waits_for_a_node=waits_for_a_node(item),
            lease_seconds=_seconds((metadata.get("annotations") or {}).get(LEASE_ANNOTATION)),
            leaving=bool(metadata.get("deletionTimestamp")),
            since=self._clock() if known is None or known.uid != metadata["uid"] else known.since,
            version=version,
        )
        self._changed(key)

    def forget(self, key: PodKey, uid: str) -> None:
        """Note that a pod is gone."""
        if (known := self._pods.get(key)) is not None and known.uid == uid:
            self._drop(key)

    def _rewind(self, scope: Scope) -> None:
        """Let any version of a pod replace what is known: the API server's history was restored from a backup."""
        self._listed.pop(scope, None)
        self._told.pop(scope, None)
        for key, pod in self.all():
            if scope in (None, key[0]):
                self._pods[key] = replace(pod, version=-1)

    def _drop(self, key: PodKey) -> None:
        del self._pods[key]
        self._changed(key)


def is_sandbox_of(item: Object, context: PodContext) -> bool:
    """True if a pod was made for a job's sandbox; others may have any name."""
    metadata = item["metadata"]
    labels = metadata.get("labels") or {}
    if labels.get("app.kubernetes.io/managed-by") != names.BROKER:
        return False
    if labels.get(names.SANDBOX_JOB_LABEL) != context.key.name:
        return False
    return any(owner.get("uid") == context.uid for owner in metadata.get("ownerReferences") or ())


def _key(item: Object) -> PodKey:
    return item["metadata"]["namespace"], item["metadata"]["name"]


def _seconds(text: str | None) -> float:
    try:
        return float(text or _LEASE_SECONDS)
    except ValueError:
        return _LEASE_SECONDS
