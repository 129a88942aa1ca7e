"""Files of a pod: its configuration and its termination message."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from pathlib import Path
from typing import Final

import msgspec

from kuberoll_api.contract import MESSAGE_BYTES, FinishMessage, PodConfig, WorkerMessage
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.removed import without_removed

TERMINATION_LOG_VARIABLE: Final = "KUBEROLL_TERMINATION_LOG"
CAUSE_BYTES: Final = 2000

_TERMINATION_LOG = "/dev/termination-log"


class ConfigRefused(ValueError):
    """The configuration of a pod is invalid; the message has the reason."""


def read_config(path: Path) -> PodConfig:
    """Read a pod's configuration.

    Raises:
        ConfigRefused: It is missing or invalid.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=PodConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigRefused(f"{path}: {error}") from error


def job_of(config: PodConfig) -> RolloutJob:
    """The job of a pod; fields that it has no longer are left out, as its operator may be of an earlier release.

    Raises:
        ValidationError: It is invalid.
    """
    return RolloutJob.model_validate(without_removed(config.job)[0])


def add_modules(config: PodConfig) -> None:
    """Search modules in the job's own files first, as `kuberoll run` does beside the manifest."""
    if config.modules is not None:
        sys.path.insert(0, config.modules)


def clip(text: str, limit: int = CAUSE_BYTES) -> str:
    """Cut a text to at most `limit` bytes of UTF-8."""
    data = text.encode()
    return text if len(data) <= limit else data[: limit - 3].decode(errors="ignore") + "…"


def encode_message(message: WorkerMessage | FinishMessage) -> bytes:
    """Encode a termination message as JSON within Kubernetes' size limit.

    If it is too long, the end of `cause` and the last `environments` are left out.
    """
    message = dataclasses.replace(message, cause=clip(message.cause))
    while len(data := msgspec.json.encode(message)) > MESSAGE_BYTES:
        if isinstance(message, FinishMessage) and message.environments:
            *kept, _ = message.environments.items()
            left_out = message.environments_left_out + 1
            message = dataclasses.replace(message, environments=dict(kept), environments_left_out=left_out)
        else:
            # Control characters are six bytes each in JSON.
            message = dataclasses.replace(message, cause=clip(message.cause, len(message.cause.encode()) // 2))
    return data


def write_termination_message(message: bytes) -> None:
    """Write the termination message for the operator; a failure to write is logged."""
    path = Path(os.environ.get(TERMINATION_LOG_VARIABLE) or _TERMINATION_LOG)
    try:
        path.write_bytes(message)
    except OSError as error:
        logging.getLogger(__name__).warning("no termination message: %s", error)
