"""What the pods of a job are told, and what they leave behind: the words between them and the operator."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

EXIT_REFUSED: Final = 78
"""The job, its dataset or its output cannot be used, and will not be by trying again (EX_CONFIG)."""

EXIT_DRAINED: Final = 75
"""Told to stop before the work was done; whoever starts it again goes on from there (EX_TEMPFAIL)."""

EXIT_FAILED: Final = 1
"""Anything else; it may be better the next time."""

PROGRESS_PORT: Final = 9464
TERMINATION_LOG_VARIABLE: Final = "KUBEROLL_TERMINATION_LOG"
CAUSE_BYTES: Final = 2000

_TERMINATION_LOG = "/dev/termination-log"
# Kubernetes keeps so many bytes of a container's message, and half a JSON object is none.
_MESSAGE_BYTES = 4096


class PodConfig(msgspec.Struct, kw_only=True):
    """The file that all pods of a job are given; what is not named here is for others, and passed over.

    Attributes:
        job: The RolloutJob, as validated.
        base: The directory where the dataset is mounted.
        endpoint: Base URL of the policy.
        port: Where a generation pod listens.
        output: The run's directory or URI.
        turns: Directory of the turn log; None: turns are not journaled.
        discovery: How the policy's replicas are found: asked for at the endpoint, by DNS, or as they stand here.
        replicas: Their base URLs, with discovery `Static`.
        replicas_host: `host:port` whose addresses are the replicas, with discovery `DNS`.
    """

    job: dict[str, Any]
    base: str
    endpoint: str
    port: int = 8000
    shard_count: int
    output: str
    turns: str | None = None
    discovery: Literal["Endpoint", "DNS", "Static"] = "Endpoint"
    replicas: list[str] = msgspec.field(default_factory=list)
    replicas_host: str | None = None


class ConfigRefused(ValueError):
    """The configuration of a pod cannot be used; the message says why."""


def read_config(path: Path) -> PodConfig:
    """Read a pod's configuration.

    Raises:
        ConfigRefused: It is not there or not what it should be.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=PodConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigRefused(f"{path}: {error}") from error


def clipped(text: str, limit: int = CAUSE_BYTES) -> str:
    """The beginning of a text, of at most so many bytes."""
    data = text.encode()
    return text if len(data) <= limit else data[: limit - 3].decode(errors="ignore") + "…"


def encode_message(message: Mapping[str, Any]) -> bytes:
    """A termination message as JSON that Kubernetes keeps whole.

    What is too much is left out: the last ones of `environments`, whose number is then in `environments_left_out`, and
    the end of `cause`.
    """
    fields = dict(message)
    fields["cause"] = clipped(str(fields.get("cause", "")))
    environments = dict(fields.get("environments", {}))
    while len(data := msgspec.json.encode(fields)) > _MESSAGE_BYTES:
        if environments:
            environments.popitem()
            fields["environments"] = environments
            fields["environments_left_out"] = len(message["environments"]) - len(environments)
        else:
            # Control characters are six bytes each in JSON.
            fields["cause"] = clipped(fields["cause"], len(fields["cause"].encode()) // 2)
    return data


def leave_message(message: bytes) -> None:
    """Leave a termination message for the operator; without a place for it, it is in the log only."""
    path = Path(os.environ.get(TERMINATION_LOG_VARIABLE) or _TERMINATION_LOG)
    try:
        path.write_bytes(message)
    except OSError as error:
        logging.getLogger(__name__).warning("no termination message: %s", error)
