"""Ray's key-value store, which is in its control plane (GCS) and as durable as the state of Ray Serve."""

from __future__ import annotations

_NAMESPACE = b"kuberoll"


class RayStore:
    """The keys of Ray's store below a prefix; Ray must be initialized. The methods block."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}/"

    def list_keys(self) -> list[str]:
        """All keys."""
        from ray.experimental.internal_kv import _internal_kv_list

        found = _internal_kv_list(self._prefix, namespace=_NAMESPACE)
        return [key.decode().removeprefix(self._prefix) for key in found]

    def get(self, key: str) -> bytes | None:
        """The value of a key; None if there is none."""
        from ray.experimental.internal_kv import _internal_kv_get

        value: bytes | None = _internal_kv_get(self._prefix + key, namespace=_NAMESPACE)
        return value

    def add(self, key: str, value: bytes) -> bool:
        """Store a value unless the key has one; return whether it was stored."""
        from ray.experimental.internal_kv import _internal_kv_put

        existed = _internal_kv_put(self._prefix + key, value, overwrite=False, namespace=_NAMESPACE)
        return not existed

    def remove(self, key: str) -> None:
        """Remove a key, if it is there."""
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(self._prefix + key, namespace=_NAMESPACE)
