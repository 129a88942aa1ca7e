"""The weights that were published for an application: a short log, of which the newest entry counts.

Ray Serve has `user_config` for what changes while a deployment runs, but takes a replica out of service while it passes
a changed one, for some tenths of a second. Weights change too often for that. The log is therefore in Ray's key-value
store, beside Serve's own state, and lives as long. `user_config` has only the weights that the configuration of the
application names.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from kuberoll_api.contract import WeightsSource

_KEPT = 8


class KeyValueStore(Protocol):
    """A store that is shared by all replicas; its methods block."""

    def list_keys(self) -> list[str]:
        """All keys."""
        ...

    def get(self, key: str) -> bytes | None:
        """The value of a key; None if there is none."""
        ...

    def add(self, key: str, value: bytes) -> bool:
        """Store a value unless the key has one; return whether it was stored."""
        ...

    def remove(self, key: str) -> None:
        """Remove a key, if it is there."""
        ...


class Publication(msgspec.Struct, kw_only=True, frozen=True):
    """An entry of the log.

    Attributes:
        number: Its place in the log.
        configuration: Digest of the application's configuration that it belongs to; replicas of another ignore it.
        weights: The weights to serve; None: the model's own.
    """

    number: int
    configuration: str
    weights: WeightsSource | None


class VersionTaken(Exception):
    """The version is that of other weights."""


class Publications:
    """The log of one application. All methods block, and may be called by any number of processes at once."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store

    def newest(self) -> Publication | None:
        """The newest entry; None if there is none."""
        while keys := self._store.list_keys():
            # It is gone if others have been published meanwhile.
            if (value := self._store.get(max(keys))) is not None:
                return msgspec.json.decode(value, type=Publication)
        return None

    def configure(self, configuration: str, weights: WeightsSource | None) -> Publication:
        """Start a configuration with the weights that it names, unless it is the current one; return the newest entry.

        Weights that were published with another configuration are replaced.
        """
        while (newest := self.newest()) is None or newest.configuration != configuration:
            self._append(newest, configuration, weights)
        return newest

    def publish(self, weights: WeightsSource | None) -> Publication:
        """Append weights to the log, unless they are the newest; return the newest entry.

        Raises:
            VersionTaken: The newest weights have this version and another URI.
            RuntimeError: No replica has started yet.
        """
        while True:
            newest = self.newest()
            if newest is None:
                raise RuntimeError("weights cannot be published before a replica has started")
            now = newest.weights
            if now == weights:
                return newest
            if now is not None and weights is not None and now.version == weights.version:
                raise VersionTaken(f"version {now.version} is already {now.uri}; use another version for other weights")
            if (added := self._append(newest, newest.configuration, weights)) is not None:
                return added

    def withdraw(self, number: int) -> Publication | None:
        """Return to the weights before an entry, with a new one, if that entry is still the newest.

        Returns:
            The new entry; None: others have been published, or nothing is known of the weights before.
        """
        newest = self.newest()
        if newest is None or newest.number != number:
            return None
        value = self._store.get(_key(number - 1))
        before = None if value is None else msgspec.json.decode(value, type=Publication)
        # Those of another configuration may not fit this one's model.
        if before is None or before.configuration != newest.configuration or before.weights == newest.weights:
            return None
        return self._append(newest, newest.configuration, before.weights)

    def _append(
        self, newest: Publication | None, configuration: str, weights: WeightsSource | None
    ) -> Publication | None:
        """Append an entry after `newest`; None: another one is there."""
        number = 1 if newest is None else newest.number + 1
        entry = Publication(number=number, configuration=configuration, weights=weights)
        if not self._store.add(_key(number), msgspec.json.encode(entry)):
            return None
        for key in self._store.list_keys():
            if key <= _key(number - _KEPT):
                self._store.remove(key)
        return entry


def _key(number: int) -> str:
    # Sorted as text.
    return f"{number:016d}"
