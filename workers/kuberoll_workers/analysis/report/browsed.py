"""The trajectories that a report lets people read: which of a long run's, and how much of their text."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from kuberoll_workers.analysis.report.row import Row, row_of
from kuberoll_workers.analysis.report.sample import EvenSample
from kuberoll_workers.analysis.report.text import cut, one_line, visible
from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryRecord
from kuberoll_workers.output.precedence import EndedRecord

MOST = 10_000
"""Trajectories in one page."""
MOST_BYTES = 12 << 20
"""Bytes of their compressed text."""
_MOST_FAILURES = 2_000
_MOST_DROPPED = 1_000

MESSAGE_CHARACTERS = 20_000
TRAJECTORY_CHARACTERS = 100_000
_MOST_MESSAGES = 250
_MOST_TURNS = 1_000
_SHORT = 2_000


class Browsed(NamedTuple):
    """One trajectory to read: its row, and its text as JSON, compressed."""

    row: Row
    text: bytes


class BrowsedSample:
    """Takes every trajectory of a run and keeps those that the page will have.

    All of them where they are at most 10,000 and their text small enough. Otherwise all failures (evenly chosen ones
    above 2,000), evenly chosen dropped ones, and evenly chosen finished ones in the room that is left.
    """

    def __init__(self, *, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes

        def sample(number: int) -> EvenSample[Browsed]:
            return EvenSample(number, most_bytes=most_bytes, size=lambda item: len(item.text))

        self._finished = sample(most)
        self._failed = sample(max(1, most * _MOST_FAILURES // MOST))
        self._dropped = sample(max(1, most * _MOST_DROPPED // MOST))

    def offer(self, record: EndedRecord) -> None:
        """Offer a trajectory; its row and its text are only made when it is kept."""
        if isinstance(record, FailureRecord):
            sample = self._failed
        else:
            sample = self._finished if isinstance(record, TrajectoryRecord) else self._dropped
        sample.offer(lambda: Browsed(row_of(record), zlib.compress(orjson.dumps(readable(record)))))

    @property
    def offered(self) -> int:
        return self._finished.offered + self._failed.offered + self._dropped.offered

    def items(self) -> list[Browsed]:
        """The sample: finished ones, failures, dropped ones, each in the order in which they ended."""
        failed = self._failed.items(self._most, self._most_bytes // 4)
        dropped = self._dropped.items(self._most - len(failed), self._most_bytes // 8)
        used = sum(len(item.text) for item in (*failed, *dropped))
        room = self._most - len(failed) - len(dropped)
        return [*self._finished.items(room, self._most_bytes - used), *failed, *dropped]


def readable(record: EndedRecord) -> dict[str, Any]:
    """What the page shows of one trajectory: at most 100,000 characters of messages, made harmless to look at."""
    kept, left_out = _kept(record.messages)
    limit = min(MESSAGE_CHARACTERS, TRAJECTORY_CHARACTERS // max(1, len(kept)))
    shown: dict[str, Any] = {
        "messages": [
            {
                "role": one_line(message.role, 40),
                "turn": message.turn,
                "text": visible(cut(message.content, limit)),
                "tokens": len(message.token_ids),
                "truncated": message.truncated,
            }
            for message in kept
        ],
        "left_out": left_out,
        "idx": _json(record.idx),
        # Seeds do not fit the numbers of a browser.
        "seed": None if record.seed is None else str(record.seed),
        "attempt": record.attempt,
    }
    if isinstance(record, FailureRecord):
        failure = {"kind": record.kind, "stage": record.stage, "cause": visible(cut(record.cause, _SHORT))}
        return {**shown, "failure": {**failure, "tries": record.tries}}
    shown |= {"rewards": record.rewards[:_MOST_TURNS], "metadata": _json(record.metadata)}
    if isinstance(record, DroppedRecord):
        return {**shown, "dropped": record.reason, "stop_reason": record.stop_reason}
    return {
        **shown,
        "parts": {one_line(name, 80): values[:_MOST_TURNS] for name, values in record.reward_parts.items()},
        "answer": None if record.answer is None else visible(cut(record.answer, _SHORT)),
        "generation": record.timing.generation_seconds[:_MOST_TURNS],
        "environment": record.timing.environment_seconds[:_MOST_TURNS],
    }


def _kept(messages: Sequence[Message]) -> tuple[list[Message], int]:
    """The messages to show, and how many are left out of their middle."""
    left_out = max(0, len(messages) - _MOST_MESSAGES)
    if not left_out:
        return list(messages), 0
    half = _MOST_MESSAGES // 2
    return [*messages[:half], *messages[len(messages) - half :]], left_out


def _json(value: Any) -> str | None:
    return None if value is None else visible(cut(orjson.dumps(value).decode(), _SHORT))
