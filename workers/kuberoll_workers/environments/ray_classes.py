"""Environments whose class is decorated with `@ray.remote`, as all of NeMo RL's are.

The class behind the decorator is created as any other. If it starts Ray workers of its own, it gets a Ray of its own: a
local instance in the environment's process, which ends with it and shares nothing with the Ray of the policy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

OBJECT_STORE_BYTES = 128 << 20
"""Memory of the object store, which holds batches of texts."""


def plain_class(found: Any) -> Any:
    """The class behind Ray's decorator; anything else is returned unchanged."""
    # Of `ray.actor.ActorClass`; there is no public way to the class.
    metadata = getattr(found, "__ray_metadata__", None)
    return found if metadata is None else metadata.modified_class


def is_ray_class(plain: Any) -> bool:
    """True if a class was decorated with `@ray.remote`."""
    return hasattr(plain, "__ray_actor_class__")


def uses_ray(plain: type) -> bool:
    """True if the modules of a class, or of its bases, define further actor classes or remote functions."""
    names = {base.__module__ for base in plain.__mro__}
    return any(
        _is_remote(value) and plain_class(value) is not plain
        for name in names
        if (module := sys.modules.get(name)) is not None
        for value in vars(module).values()
    )


def authentication(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables by which a new Ray has a token of its own.

    Otherwise Ray reads the user's in `~/.ray`, or makes one there, which limited access and a read-only root refuse.

    Args:
        variables: Those of the process; a token that they name is left.
    """
    if "RAY_AUTH_TOKEN" in variables or "RAY_AUTH_TOKEN_PATH" in variables:
        return {}
    return {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


def start_ray() -> None:
    """Start a local Ray for this process, if there is none yet.

    Raises:
        Exception: Ray could not be started.
    """
    import ray

    if ray.is_initialized():
        return
    os.environ.update(authentication(os.environ))
    with _own_signals():
        ray.init(
            address="local",
            include_dashboard=False,
            # With limited access it warns that it cannot see other processes.
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
            # A process with limited access can only write there.
            _temp_dir=os.path.realpath(tempfile.gettempdir()),
        )


def _is_remote(value: Any) -> bool:
    return hasattr(value, "__ray_metadata__") or type(value).__name__ == "RemoteFunction"


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, which Ray replaces by one that exits at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
