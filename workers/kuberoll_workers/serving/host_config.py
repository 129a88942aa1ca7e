"""Configuration of the process that hosts an engine; it imports neither Ray nor an HTTP client."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kuberoll_api.contract import ServeArgs
from kuberoll_api.model.generation import Generation
from kuberoll_workers.policy.auth import Tokens
from kuberoll_workers.serving.group import PodGroup

START_PHASES: Final = ("ray", "serve", "engine", "proxy")
"""Phases of the host's start, in their order."""

_GPU_RESOURCE = "nvidia.com/gpu"


class HostConfig(msgspec.Struct, kw_only=True):
    """Configuration of the host.

    Attributes:
        scratch: Directory for Ray's and the proxy's files; a path of at most 25 characters, because sockets with long
            names are below it.
        routing: `Session` keeps a trajectory's turns on one replica.
        address: Address to serve at; 0.0.0.0: all addresses of the machine.
        port: Port to serve at; 0: any free one.
        tokens: Tokens that callers must present; None: no authorization.
        group: The pods that the one replica spans, led by this one; None: it is on this machine only.
        patience: Seconds for the other pods to join.
        drains: Whether requests in flight are answered before the end; False: nobody waits for any.
    """

    app: ServeArgs
    scratch: str
    routing: Literal["Session", "LeastLoaded"] = "Session"
    address: str = "127.0.0.1"
    port: int = 0
    tokens: Tokens | None = None
    group: PodGroup | None = None
    patience: float = 1800.0
    drains: bool = True


def requested_gpus(generation: Generation) -> float | None:
    """GPUs of one replica as the job sets them; None: as the engine's arguments imply."""
    if generation.gpus_per_replica is not None:
        return generation.gpus_per_replica
    gpus = generation.resources.limits.get(_GPU_RESOURCE)
    return None if gpus is None else float(gpus)
