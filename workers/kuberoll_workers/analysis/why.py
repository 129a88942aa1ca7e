"""What happened to a trajectory, in order and in plain words, and whose doing it was."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kuberoll_workers.data.causes import REASONS
from kuberoll_workers.data.incidents import Incident, united
from kuberoll_workers.data.record import DroppedRecord, FailureRecord, Partial, TrajectoryRecord
from kuberoll_workers.data.stop_reasons import ENDINGS
from kuberoll_workers.data.text import one_line

_TEXT: Final = 300
_WORDS_OF_KINDS: Final = {
    "policy": "the policy's doing",
    "environment": "the environment's fault, not the policy's",
    "infrastructure": "the infrastructure's fault, not the policy's",
    "data": "the data's fault, not the policy's",
    "operator": "a limit or an interruption of the run, not the policy's doing",
}
_SEQUELS: Final = {
    "sent again": "the request was sent again",
    "tried again": "it was tried again",
    "restored": "the episode was restored",
    "started over": "the trajectory started over",
    "resumed": "it went on after its stored turns",
}

AnyEnd = TrajectoryRecord | FailureRecord | DroppedRecord


def story(end: AnyEnd | None, earlier: Sequence[FailureRecord] = (), partial: Partial | None = None) -> list[str]:
    """Lines about one trajectory.

    Args:
        end: The line of it that counts; None: it has not ended.
        earlier: Its failures in earlier attempts, oldest first.
        partial: Its journaled turns, if it has not ended.
    """
    lines = [_headline(end, partial)]
    told: list[Incident] = []
    for failure in earlier:
        lines += _incidents(new := _new(failure.incidents, told))
        told += new
        lines += [f"  attempt {failure.attempt + 1} failed: {_failed(failure)}", *_details(failure.evidence)]
    turns = () if partial is None else partial.turns
    incidents = united(turn.incidents for turn in turns) if end is None else end.incidents
    lines += _incidents(_new(incidents, told))
    if not earlier and not incidents:
        lines.append("  nothing went wrong on its way")
    if isinstance(end, FailureRecord):
        lines += [f"  it failed: {_failed(end)}", *_details(end.evidence)]
        if end.seconds is not None:
            lines.append(f"  it cost {_cost(end.seconds, end.tokens or 0) or 'nothing'}")
    lines.append(_verdict(end))
    return lines


def _new(incidents: Sequence[Incident] | None, told: Sequence[Incident]) -> list[Incident]:
    """Incidents that were not told: an attempt that goes on after the turns of another has its incidents, too."""
    return [one for one in incidents or () if one not in told]


def _headline(end: AnyEnd | None, partial: Partial | None) -> str:
    if end is None:
        if partial is None:
            return "it is not in the run: it has not begun, or no turn of it is complete"
        return f"{_name(partial.key)} has not ended: {_turns(len(partial.turns))} of it are stored"
    name = f"{_name(end.key)} of {end.task_name}"
    if isinstance(end, FailureRecord):
        row = "" if end.row is None else f" (row {one_line(end.row, _TEXT)})"
        how = "has no score yet" if end.unscored else "has failed"
        return f"{name}{row} {how} after {_turns(end.turn_count)}, in attempt {end.attempt + 1}"
    if isinstance(end, DroppedRecord):
        return f"{name} was dropped after {_turns(end.turn_count)}"
    return f"{name} has finished with the reward {end.total_reward:g} after {_turns(end.turn_count)}"


def _name(key: tuple[int, int]) -> str:
    return f"trajectory {key[0]}/{key[1]}"


def _turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"


def _incidents(incidents: Iterable[Incident] | None) -> list[str]:
    lines = []
    for incident in incidents or ():
        known = REASONS.get(incident.reason)
        what = incident.reason if known is None else known.words
        times = "" if incident.count == 1 else f" {incident.count} times"
        where = "before its first turn" if incident.turn == 0 else f"turn {incident.turn}"
        clock = time.strftime("%H:%M:%S", time.gmtime(incident.at))
        sequel = _SEQUELS.get(incident.sequel, incident.sequel)
        cost = _cost(incident.seconds, incident.tokens)
        ended = f"; it cost {cost}" if cost else ""
        lines.append(f"  {clock}Z {where}: {what}{times} ({incident.kind}); {sequel}{ended}")
        lines += [f"             {one_line(incident.text, _TEXT)}"] if incident.text else []
        lines += _details(incident.evidence)
    return lines


def _failed(failure: FailureRecord) -> str:
    known = None if failure.reason is None else REASONS.get(failure.reason)
    what = "" if known is None else f"{known.words}: "
    tries = "" if failure.tries == 1 else f", {failure.tries} times"
    return f"{what}{one_line(failure.cause, _TEXT)}{tries} ({failure.kind}, {failure.stage})"


_NAMES: Final = {
    "http_status": "HTTP status",
    "exit_code": "exit code",
    "signal": "signal",
    "error": "system error",
    "event": "event",
}


def _details(evidence: Mapping[str, Any] | None) -> list[str]:
    if not evidence:
        return []
    parts = [f"{_NAMES.get(name, name)} {one_line(str(value), _TEXT)}" for name, value in evidence.items()]
    return [f"             evidence: {', '.join(parts)}"]


def _cost(seconds: float, tokens: int) -> str:
    parts = [f"{seconds:.1f} s"] if seconds >= 0.05 else []
    parts += [f"{tokens} generated tokens"] if tokens else []
    return " and ".join(parts)


def _verdict(end: AnyEnd | None) -> str:
    if end is None:
        return "It has no reward yet."
    if isinstance(end, FailureRecord):
        whose = _WORDS_OF_KINDS[end.kind]
        if end.unscored:
            return (
                f"So it has no reward yet, which is not a reward of 0: {whose}. kuberoll rescore --failed or --resume "
                "scores what is stored, and nothing is generated again."
            )
        return f"So it has no reward, which is not a reward of 0: {whose}. --resume plays it again."
    outcome = end.reason if isinstance(end, DroppedRecord) else end.stop_reason
    words = ENDINGS[outcome].words
    if isinstance(end, DroppedRecord):
        return f"So it has no part in the run: it was dropped, since {words}."
    return f"So its reward is the policy's doing: {words}."


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonCount:
    """How often something went wrong in a run.

    Attributes:
        kind, reason: Whose doing, and why.
        failures: Trajectories that it ended.
        incidents: Times that a trajectory went on.
        seconds, tokens: What both have thrown away.
        example: A trajectory, task and rollout index.
    """

    kind: str
    reason: str
    seconds: float
    tokens: int
    example: tuple[int, int]
    failures: int = 0
    incidents: int = 0


def counted(records: Iterable[AnyEnd]) -> list[ReasonCount]:
    """What went wrong in a run by its reason, the most frequent failures first, then the most expensive incidents."""
    found: dict[tuple[str, str], ReasonCount] = {}
    for new in (one for record in records for one in _counts_of(record)):
        old = found.get((new.kind, new.reason))
        found[new.kind, new.reason] = new if old is None else _sum(old, new)
    return sorted(found.values(), key=lambda one: (-one.failures, -one.seconds, -one.incidents, one.reason))


def _counts_of(record: AnyEnd) -> Iterator[ReasonCount]:
    key = (record.task_index, record.rollout_index)
    for one in record.incidents or ():
        yield ReasonCount(
            kind=one.kind, reason=one.reason, incidents=one.count, seconds=one.seconds, tokens=one.tokens, example=key
        )
    if isinstance(record, FailureRecord):
        yield ReasonCount(
            kind=record.kind,
            reason=record.reason or record.stage,
            failures=1,
            seconds=record.seconds or 0.0,
            tokens=record.tokens or 0,
            example=key,
        )


def _sum(one: ReasonCount, other: ReasonCount) -> ReasonCount:
    return replace(
        one,
        failures=one.failures + other.failures,
        incidents=one.incidents + other.incidents,
        seconds=one.seconds + other.seconds,
        tokens=one.tokens + other.tokens,
    )
