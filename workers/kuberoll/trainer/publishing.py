"""Publishing of weights: a trainer's weights become what the replicas of a policy serve.

docs/how-to/publish-weights.md describes what happens when one of the two fails in the middle.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from kuberoll.trainer.broadcast import Broadcast
from kuberoll.trainer.endpoint import EndpointError, ServedWeights, WeightsEndpoint
from kuberoll.trainer.locations import open_location
from kuberoll.trainer.transports import Adapters, Deltas, Files, Transport, describe
from kuberoll_workers.data.weights.manifest import (
    MANIFEST_FILE,
    MODEL_FILE,
    ManifestRefused,
    WeightsManifest,
    decode_manifest,
    directory_name,
)

TransportName = Literal["files", "deltas", "adapters", "broadcast"]

_log = logging.getLogger(__name__)

_TRANSPORTS: Final[Mapping[str, Callable[[], Transport]]] = {
    "adapters": Adapters,
    "broadcast": Broadcast,
    "deltas": Deltas,
    "files": Files,
}
_OWN_VERSION = 0
_LOOK_SECONDS: Final = 0.05
_LONGEST_LOOK_SECONDS: Final = 1.0
_RESTORE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A version that was published.

    Attributes:
        uri: Where it is, as replicas see it.
        bytes: Of the files that were written for it; with `broadcast` of the tensors that each replica receives.
        seconds: Wall seconds by phase: `write` (reading the weights, comparing, writing the files, or copying them),
            `store` (making them a version: sync, or upload), `serve` (until every replica served it; absent with
            `wait=False`), `files` (writing them afterwards, with `Broadcast(files=True)`).
        replicas: Replicas that served it in the end; empty with `wait=False`.
    """

    version: int
    uri: str
    bytes: int
    seconds: dict[str, float]
    replicas: tuple[str, ...] = ()


class PublishFailed(Exception):
    """A version is not served by every replica; the message says why, and which versions they serve now.

    Attributes:
        version: The version that was to be published.
        served: What the replicas served at last; None: the policy did not answer.
    """

    def __init__(self, version: int, why: str, served: ServedWeights | None) -> None:
        now = "the policy does not answer" if served is None else _situation(served, version)
        super().__init__(f"version {version} is not served: {why}. {now[:1].upper()}{now[1:]}")
        self.version = version
        self.served = served

    @property
    def served_version(self) -> str | None:
        """The version that every replica serves now; None: they differ, or it is not known."""
        return None if self.served is None else self.served.everywhere


class PublishSuperseded(PublishFailed):
    """Another version was published before every replica served this one; it is not taken back."""


class Publisher:
    """Publishes versions of weights for one policy. It is used by one thread at a time.

    A version is a directory at a location that the trainer writes and the replicas read. It appears there as a whole,
    is never overwritten, and is removed when it is old and no replica serves it.
    """

    def __init__(
        self,
        *,
        endpoint: WeightsEndpoint,
        location: str | Path,
        transport: TransportName | Transport = "files",
        keep: int = 3,
        dtype: str | None = None,
        timeout: float = 600.0,
        patience: float = 30.0,
        replica_location: str | None = None,
    ) -> None:
        """
        Args:
            endpoint: Of the policy, or a job's `JobWeights`.
            location: Directory or object store's URI, of this policy alone.
            transport: `files`, `deltas`, `adapters`, `broadcast`, or an object such as `Deltas(anchor_every=50)`.
            keep: Number of the newest versions to keep. Older ones are removed, but not what a replica serves, nor what
                later changes build on.
            dtype: Type to which floating-point torch tensors are converted, such as `bfloat16`; None: none.
            timeout: Seconds until every replica must serve a version.
            patience: Seconds for which a replica may report a problem with it, and try again.
            replica_location: The location as replicas see it, where they have it mounted elsewhere; None: the same.

        Raises:
            LocationError: The kind of location is unknown.
            ValueError: An argument is invalid.
        """
        if keep < 2:
            raise ValueError(
                f"keep: found {keep}, expected 2 or more: the old version is needed until the new is served"
            )
        if isinstance(transport, str) and transport not in _TRANSPORTS:
            raise ValueError(f"transport: found {transport!r}; use one of {', '.join(_TRANSPORTS)}, or an object")
        self.endpoint = endpoint
        self._location = open_location(location)
        self._replica_location = None if replica_location is None else replica_location.rstrip("/")
        self._transport: Transport = _TRANSPORTS[transport]() if isinstance(transport, str) else transport
        self._transport.reach(getattr(endpoint, "url", None))
        self._keep = keep
        self._dtype = dtype
        self._timeout = timeout
        self._patience = patience
        # What is served again if the last publication fails.
        self._before = str(_OWN_VERSION)

    @property
    def newest(self) -> int:
        """The greatest version at the location; 0: there is none."""
        return max(self._location.versions(), default=_OWN_VERSION)

    def next_version(self) -> int:
        """The lowest version that can be published.

        Raises:
            EndpointError: The policy does not answer.
        """
        return max(self.newest, _number(self.endpoint.weights().wanted)) + 1

    def publish(self, weights: Any, *, version: int, wait: bool = True) -> Publication:
        """Write a version, have all replicas serve it, and remove old ones.

        Generation goes on while it is written and fetched, and pauses for as long as a replica loads it.

        Args:
            weights: A torch module, a state dict of torch tensors or numpy arrays, or a directory with *.safetensors;
                of an adapter a PeftModel, its state dict, or its directory. Call it between two steps: the weights
                must not change meanwhile.
            version: Greater than any published before.
            wait: Return when every replica serves it; False: when the policy has been told.

        Raises:
            PublishFailed: With `wait`: a replica could not serve it, or not in time. All are told to serve the version
                before, which the message confirms or not.
            EndpointError: The policy does not answer; nothing was published.
            LocationError: The version is there already, or another publisher is at work.
            UnusableWeights: The weights cannot be stored; nothing was published.
            ValueError: The version is not greater than those before.
        """
        before = self.endpoint.weights()
        version = self._checked_version(version, before)
        clock = _Clock()
        with self._location.writing(), self._location.workspace(version) as target:
            try:
                with clock.phase("write"):
                    manifest = self._transport.write(weights, version=version, dtype=self._dtype, target=target)
                    manifest = describe(manifest, target)
                size = sum(manifest.files.values()) + self._transport.direct_bytes()
                with clock.phase("store"):
                    self._location.commit(version, target)
                self._announce(version, replicas=len(before.replicas))
            except BaseException:
                self._transport.forget()
                raise
        self._before = _to_return_to(before)
        publication = Publication(version=version, uri=self._uri(version), bytes=size, seconds=clock.seconds)
        if not wait:
            self._remove_old(before)
            return publication
        with clock.phase("serve"):
            served = self._until_served(version)
        if self._transport.leaves_files:
            with clock.phase("files"):
                self._add_anchor(version)
        self._remove_old(served)
        return Publication(
            version=version,
            uri=publication.uri,
            bytes=size,
            seconds=clock.seconds,
            replicas=tuple(sorted(served.replicas)),
        )

    def wait(self, version: int) -> ServedWeights:
        """Wait until every replica serves the version that was published last, with `wait=False`.

        Raises:
            PublishFailed: As with `publish`.
        """
        served = self._until_served(version)
        self._remove_old(served)
        return served

    def close(self) -> None:
        """Stop what runs for the transport: with `broadcast`, later replicas then find no weights but the files."""
        self._transport.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked_version(self, version: object, before: ServedWeights) -> int:
        newest = max(self.newest, _number(before.wanted))
        number = whole_number(version)
        if number is None or number <= newest:
            raise ValueError(
                f"version: found {version!r}, but {newest} has been published: give a whole number from {newest + 1}; "
                "versions only grow during a run"
            )
        return number

    def _uri(self, version: int) -> str:
        if self._replica_location is None:
            return self._location.uri(version)
        return f"{self._replica_location}/{directory_name(version)}"

    def _announce(self, version: int, *, replicas: int) -> None:
        try:
            self.endpoint.serve(self._transport.address(version, self._uri(version), replicas=replicas), str(version))
        except EndpointError as error:
            # Without an answer it may have been heard.
            served = None if error.status is not None else self._look()
            if served is None or served.wanted != str(version):
                raise

    def _until_served(self, version: int) -> ServedWeights:
        """
        Raises:
            PublishFailed: It is not served, or not in time.
        """
        deadline = time.monotonic() + self._timeout
        trouble_since: float | None = None
        pause = _LOOK_SECONDS
        while True:
            silence = ""
            try:
                served = self.endpoint.weights()
            except EndpointError as error:
                # The last replica may be one that is being replaced.
                silence = str(error)
            else:
                if served.wanted != str(version):
                    raise self._not_wanted(version, served)
                if served.everywhere == str(version):
                    return served
                if not served.problems:
                    trouble_since = None
                elif trouble_since is None:
                    # Replicas try again and again, and then find it.
                    self._add_anchor(version)
                    trouble_since = time.monotonic()
                elif time.monotonic() - trouble_since > self._patience:
                    raise self._failed(version, "; ".join(sorted(set(served.problems.values()))))
            if time.monotonic() > deadline:
                raise self._failed(version, silence or f"not every replica had it after {self._timeout:g} s")
            time.sleep(pause)
            pause = min(1.2 * pause, _LONGEST_LOOK_SECONDS)

    def _not_wanted(self, version: int, served: ServedWeights) -> PublishFailed:
        if (other := _number(served.wanted)) > version:
            return PublishSuperseded(version, f"version {other} was published meanwhile", served)
        self._transport.forget()
        return PublishFailed(
            version,
            f"the policy wants version {served.wanted} again: a replica that it broke withdrew it (the log of its "
            "engine says why), another publisher took it back, or the policy was started anew",
            self._until_everywhere(served.wanted) or served,
        )

    def _failed(self, version: int, why: str) -> PublishFailed:
        """Take a version back."""
        self._transport.forget()
        before = self._before
        own = before == str(_OWN_VERSION)
        if not own and _number(before) not in self._location.versions():
            why += f"; version {before} cannot be restored: it is not at this publisher's location"
            return PublishFailed(version, why, self._look())
        # Without an answer replicas go on trying; what they serve is in the message.
        with contextlib.suppress(EndpointError):
            uri = None if own else self._transport.address(int(before), self._uri(int(before)), replicas=1)
            self.endpoint.serve(uri, before)
        return PublishFailed(version, why, self._until_everywhere(before))

    def _until_everywhere(self, version: str) -> ServedWeights | None:
        """Wait a while until every replica serves a version; return what they serve at last."""
        deadline = time.monotonic() + min(self._timeout, _RESTORE_SECONDS)
        while True:
            served = self._look()
            if (served is not None and served.everywhere == version) or time.monotonic() > deadline:
                return served
            time.sleep(_LOOK_SECONDS)

    def _look(self) -> ServedWeights | None:
        try:
            return self.endpoint.weights()
        except EndpointError:
            return None

    def _add_anchor(self, version: int) -> None:
        """Add the whole weights to a version that a replica cannot make of changes."""
        with self._location.writing(), self._location.workspace(version) as target:
            if (name := self._transport.write_anchor(version, target)) is not None:
                self._location.add(version, target, name)

    def _remove_old(self, served: ServedWeights) -> None:
        """Remove what nobody needs; what cannot be removed now is removed later."""
        if None in served.replicas.values():
            # Nobody knows what it serves.
            return
        try:
            versions = self._location.versions()
            used = [served.wanted, *filter(None, served.replicas.values())]
            needed = {*versions[-self._keep :], *map(_number, used)}
            for version in sorted(needed & set(versions)):
                needed.update(self._bases(version))
            with self._location.writing():
                for version in versions:
                    if version not in needed:
                        self._location.remove(version)
        except Exception:
            # Every object store's library raises its own exceptions, and the new version is published.
            _log.exception("old versions cannot be removed")

    def _bases(self, version: int) -> Iterator[int]:
        """The versions down to an anchor of which a version is made."""
        manifest = self._manifest(version)
        while manifest is not None and manifest.base is not None and MODEL_FILE not in manifest.files:
            base = int(manifest.base.directory.rpartition("-")[2])
            yield base
            manifest = self._manifest(base)

    def _manifest(self, version: int) -> WeightsManifest | None:
        data = self._location.read(version, MANIFEST_FILE)
        try:
            return None if data is None else decode_manifest(data, where=self._location.uri(version))
        except ManifestRefused:
            return None


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - began


def whole_number(value: Any) -> int | None:
    """The value of a whole number, also of numpy or PyTorch; None: it is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _number(version: str) -> int:
    """A version as a number; 0: it was not published by a `Publisher`."""
    return int(version) if version.isdecimal() else _OWN_VERSION


def _to_return_to(before: ServedWeights) -> str:
    """The version to serve if the next one fails."""
    versions = set(before.replicas.values())
    if before.problems and len(versions) == 1 and (served := versions.pop()) is not None:
        # None has what is wanted: its trainer died while it was published.
        return served
    return before.wanted


def _situation(served: ServedWeights, version: int) -> str:
    everywhere = served.everywhere
    return str(served) if everywhere in (None, str(version)) else f"the old version {everywhere} is served everywhere"
