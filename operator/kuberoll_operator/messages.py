"""Termination messages of a job's pods, validated against the contract: environments can write them, too."""

from __future__ import annotations

from typing import Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from kuberoll_api.contract import FinishMessage, WorkerMessage
from kuberoll_operator.backends.pods import ContainerExit

_WORKER: Final = TypeAdapter(WorkerMessage)
_FINISH: Final = TypeAdapter(FinishMessage)
_Message = TypeVar("_Message")


def worker_message(end: ContainerExit | None) -> WorkerMessage | None:
    """Message of a worker's or the check's container; None if it has not ended or left no valid message."""
    return _parse(end, _WORKER)


def finish_message(end: ContainerExit | None) -> FinishMessage | None:
    """Message of the finish pod's container; None if it has not ended or left no valid message."""
    return _parse(end, _FINISH)


def _parse(end: ContainerExit | None, adapter: TypeAdapter[_Message]) -> _Message | None:
    if end is None:
        return None
    try:
        return adapter.validate_json(end.message)
    except ValidationError:
        return None
