"""Trajectories that can be read in a report: the choice among many, and the limits of their text."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from kuberoll_workers.analysis.paths import shared_messages
from kuberoll_workers.analysis.report.row import TrajectoryRow, row_of
from kuberoll_workers.analysis.report.sample import EvenSample
from kuberoll_workers.analysis.report.token_details import MOST_TOKENS, token_details
from kuberoll_workers.analysis.report.token_texts import TokenTexts
from kuberoll_workers.analysis.report.turns import continuity_text
from kuberoll_workers.analysis.why import story
from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryRecord
from kuberoll_workers.data.text import cut, one_line, visible
from kuberoll_workers.data.tracebacks import MAX_TEXT
from kuberoll_workers.output.precedence import EndedRecord

MOST = 10_000
"""Maximum number of trajectories in a page."""
MOST_BYTES = 12 << 20
"""Maximum size of their compressed text, in bytes."""
_MOST_FAILURES = 2_000
_MOST_DROPPED = 1_000

MESSAGE_CHARACTERS = 20_000
TRAJECTORY_CHARACTERS = 100_000
_MOST_MESSAGES = 250
_MOST_TURNS = 1_000
_MOST_BRANCHES = 50
_SHORT = 2_000


class ReadableTrajectory(NamedTuple):
    """A trajectory in a report: its row, and its text as compressed JSON."""

    row: TrajectoryRow
    text: bytes


class TrajectorySample:
    """Sample of a run's trajectories for a report.

    It has all trajectories if there are at most 10,000 and their text is small enough. Otherwise it has all failures (a
    uniform selection above 2,000), a uniform selection of dropped ones, and one of finished ones for the rest.
    """

    def __init__(self, *, most: int = MOST, most_bytes: int = MOST_BYTES, texts: TokenTexts | None = None) -> None:
        """Start an empty sample.

        Args:
            most: Maximum number of trajectories.
            most_bytes: Maximum size of their compressed text.
            texts: Texts of tokens; None: their ids are shown.
        """
        self._texts = texts
        self._most = most
        self._most_bytes = most_bytes

        def sample(number: int) -> EvenSample[ReadableTrajectory]:
            return EvenSample(number, most_bytes=most_bytes, size=lambda item: len(item.text))

        self._finished = sample(most)
        self._failed = sample(max(1, most * _MOST_FAILURES // MOST))
        self._dropped = sample(max(1, most * _MOST_DROPPED // MOST))

    def offer(self, record: EndedRecord) -> None:
        """Offer a trajectory; its row and text are only created if it is kept."""
        if isinstance(record, FailureRecord):
            sample = self._failed
        else:
            sample = self._finished if isinstance(record, TrajectoryRecord) else self._dropped
        sample.offer(lambda: self._readable(record))

    def _readable(self, record: EndedRecord) -> ReadableTrajectory:
        return ReadableTrajectory(row_of(record), zlib.compress(orjson.dumps(readable(record, self._texts))))

    @property
    def offered(self) -> int:
        return self._finished.offered + self._failed.offered + self._dropped.offered

    def items(self) -> list[ReadableTrajectory]:
        """The sample: finished, failed, then dropped trajectories, each in the order in which they ended."""
        failed = self._failed.items(self._most, self._most_bytes // 4)
        dropped = self._dropped.items(self._most - len(failed), self._most_bytes // 8)
        used = sum(len(item.text) for item in (*failed, *dropped))
        room = self._most - len(failed) - len(dropped)
        return [*self._finished.items(room, self._most_bytes - used), *failed, *dropped]


def readable(record: EndedRecord, texts: TokenTexts | None = None) -> dict[str, Any]:
    """The page's data about one trajectory: at most 100,000 characters of messages, without control characters.

    Args:
        texts: Texts of tokens; None: their ids are shown.
    """
    kept, left_out = _kept(record.messages, _MOST_MESSAGES)
    branches = _branches(record)
    count = len(kept) + sum(len(messages) for _, messages, _ in branches)
    limit = min(MESSAGE_CHARACTERS, TRAJECTORY_CHARACTERS // max(1, count))
    shown: dict[str, Any] = {
        "messages": list(_messages(kept, limit, texts, room=MOST_TOKENS)),
        "left_out": left_out,
        "idx": _json(record.idx),
        # Seeds do not fit into JavaScript's numbers.
        "seed": None if record.seed is None else str(record.seed),
        "attempt": record.attempt,
        **({"story": [visible(line) for line in story(record)]} if record.incidents is not None else {}),
    }
    if isinstance(record, FailureRecord):
        failure = {"kind": record.kind, "stage": record.stage, "cause": visible(cut(record.cause, _SHORT))}
        if record.traceback is not None:
            failure["traceback"] = visible(cut(record.traceback, MAX_TEXT))
        if record.row is not None:
            failure["row"] = visible(cut(record.row, _SHORT))
        return {**shown, "metadata": _json(record.metadata), "failure": {**failure, "tries": record.tries}}
    shown |= {"rewards": record.rewards[:_MOST_TURNS], "metadata": _json(record.metadata)}
    if isinstance(record, DroppedRecord):
        return {**shown, "dropped": record.reason, "stop_reason": record.stop_reason}
    return {
        **shown,
        "parts": {one_line(name, 80): values[:_MOST_TURNS] for name, values in record.reward_parts.items()},
        "answer": None if record.answer is None else visible(cut(record.answer, _SHORT)),
        "generation": record.timing.generation_seconds[:_MOST_TURNS],
        "environment": record.timing.environment_seconds[:_MOST_TURNS],
        **_agent(record, branches, limit, texts),
    }


_Kept = tuple[int, list[Message], int]
"""Number of messages of a branch that an earlier path has, messages to show, and number of those left out."""


def _branches(record: EndedRecord) -> list[_Kept]:
    branches = (isinstance(record, TrajectoryRecord) and record.branches) or []
    most = max(2, _MOST_MESSAGES // max(1, min(len(branches), _MOST_BRANCHES)))
    return [
        (shared, *_kept(branch.messages[shared:], most))
        for branch in branches[:_MOST_BRANCHES]
        for shared in [shared_messages(branch)]
    ]


def _agent(record: TrajectoryRecord, branches: Sequence[_Kept], limit: int, texts: TokenTexts | None) -> dict[str, Any]:
    """What only trajectories of agents have; empty for others."""
    found: dict[str, Any] = {}
    if record.continuity:
        found["continuity"] = continuity_text(record.continuity)
    if record.branches:
        room = MOST_TOKENS // len(branches)
        found["branches"] = [
            {"shared": shared, "messages": list(_messages(kept, limit, texts, room=room)), "left_out": left_out}
            for shared, kept, left_out in branches
        ]
        found["branch_count"] = len(record.branches)
    return found


def _messages(
    messages: Sequence[Message], limit: int, texts: TokenTexts | None, *, room: int
) -> Iterator[dict[str, Any]]:
    for message in messages:
        details: dict[str, Any] = {}
        if message.sampled:
            details = token_details(message, texts, room=room, whole=len(message.content) <= limit)
            room -= len(details.get("logprobs", ()))
        yield {
            "role": one_line(message.role, 40),
            "turn": message.turn,
            "text": visible(cut(message.content, limit)),
            "tokens": len(message.token_ids),
            "truncated": message.truncated,
            "sampled": message.sampled,
            **details,
        }


def _kept(messages: Sequence[Message], most: int) -> tuple[list[Message], int]:
    """Messages to show, and the number of messages left out of their middle."""
    half = most // 2
    left_out = max(0, len(messages) - 2 * half)
    if not left_out:
        return list(messages), 0
    return [*messages[:half], *messages[len(messages) - half :]], left_out


def _json(value: Any) -> str | None:
    return None if value is None else visible(cut(orjson.dumps(value).decode(), _SHORT))
