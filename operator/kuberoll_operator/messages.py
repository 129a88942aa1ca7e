"""Termination messages of a job's pods as the contract has them, validated: environments may write there, too."""

from __future__ import annotations

from typing import Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from kuberoll_api.contract import FinishMessage, WorkerMessage
from kuberoll_operator.backends.pods import ContainerExit

_WORKER: Final = TypeAdapter(WorkerMessage)
_FINISH: Final = TypeAdapter(FinishMessage)
_Message = TypeVar("_Message")


def worker_message(end: ContainerExit | None) -> WorkerMessage | None:
    """The message of a worker's container, or of the check's; None: it has not ended, or left no valid one."""
    return _parse(end, _WORKER)


def finish_message(end: ContainerExit | None) -> FinishMessage | None:
    """The message of the finish pod's container; None: it has not ended, or left no valid one."""
    return _parse(end, _FINISH)


def _parse(end: ContainerExit | None, adapter: TypeAdapter[_Message]) -> _Message | None:
    if end is None:
        return None
    try:
        return adapter.validate_json(end.message)
    except ValidationError:
        return None
