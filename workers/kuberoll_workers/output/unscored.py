"""Unscored trajectories of a run: what a later attempt scores without generating it again."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import IO

from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.record import (
    FailureRecord,
    Partial,
    RecordError,
    TrajectoryKey,
    decode_line,
    encode_line,
)


class UnscoredTrajectories:
    """The newest unscored line of each trajectory, in a temporary file; memory: some 200 bytes for each."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        # Attempt, place in the file, and whether it was an outage.
        self._lines: dict[TrajectoryKey, tuple[int, int, bool]] = {}

    def __contains__(self, key: TrajectoryKey) -> bool:
        return key in self._lines

    def add(self, failure: FailureRecord) -> None:
        """Take a line; an older one than is known of its trajectory does not count."""
        if not failure.unscored or failure.attempt < self._lines.get(failure.key, (0, 0, False))[0]:
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="kuberoll-")  # noqa: SIM115 - removed with this object
        self._lines[failure.key] = failure.attempt, self._file.seek(0, 2), failure.outage
        self._file.write(encode_line(failure))

    def attempt(self, key: TrajectoryKey) -> int:
        """The attempt that left a trajectory unscored; -1: none did."""
        return self._lines.get(key, (-1, 0, False))[0]

    def is_outage(self, key: TrajectoryKey) -> bool:
        """True if an outage left a trajectory unscored (`FailureRecord.outage`)."""
        return key in self._lines and self._lines[key][2]

    def discard(self, key: TrajectoryKey) -> None:
        """Forget a trajectory."""
        self._lines.pop(key, None)

    def take(self, key: TrajectoryKey) -> Partial | None:
        """The turns of a trajectory, removed; None if it is not an unscored one, or what was stored of it is none."""
        if (found := self._lines.pop(key, None)) is None:
            return None
        assert self._file is not None
        self._file.seek(found[1])
        try:
            return turns_to_score(decode_line(self._file.readline(), FailureRecord, where="an unscored trajectory"))
        except RecordError:
            return None


def turns_to_score(failure: FailureRecord) -> Partial | None:
    """The turns of an unscored trajectory; None if it is not one.

    Raises:
        RecordError: They are not those of its messages.
    """
    if not failure.turns:
        return None
    messages: dict[int, list[Message]] = {}
    for message in failure.messages:
        messages.setdefault(message.turn, []).append(message)
    turns = [replace(turn, messages=messages.get(turn.turn, [])) for turn in failure.turns]
    *before, newest = turns
    if [turn.turn for turn in turns] != [*range(1, len(turns) + 1)] or not all(turn.is_complete for turn in before):
        raise RecordError(f"trajectory {tuple(failure.key)}: its turns are not those of its messages")
    if not all(turn.messages and turn.messages[0].sampled for turn in turns):
        raise RecordError(f"trajectory {tuple(failure.key)}: a turn begins without a response")
    newest.metadata = failure.metadata
    return Partial(turns)
