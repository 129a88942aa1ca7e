"""How trajectories end: the one table of stop reasons and reasons for dropping, and what is true of each.

What makes a trajectory end names its reason; what reads one asks this table. A new reason is a name and a row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

StopReason = Literal["terminated", "truncated", "max_turns", "failed"]
"""End of a trajectory: by the environment, by a length limit, by the turn limit, or by a failure."""

DropReason = Literal["oversampled", "filtered", "stale"]
"""Reason for dropping a trajectory: enough other samples finished first, its group was filtered out, or its group is
older than `rollout.onPolicy.maxLag` allows."""

Outcome = Literal[StopReason, DropReason]
"""Outcome of a trajectory: its stop reason, or why it was dropped."""

Kind = Literal["finished", "failed", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is true of trajectories with an outcome.

    Attributes:
        kind: `finished`: it has a reward and counts as complete; `failed`: it has none; `dropped`: it is not used.
        title: Its name for people.
        words: What led to it, a sentence without its end.
        by_environment: The environment ended the episode.
        cut: A length limit cut what would have come: trainers treat its end as none of the policy's choice.
        whole_group: Its prompt group is given up as a whole, and never run again.
        precedence: Rank of its lines among the lines of a trajectory: the greatest counts. A resumed run runs those of
            0 again.
        by_rewards: The rewards of its group decide, which are all equal: without it nothing is missing.
        remedy: What to do where it removes the slow; empty: it does not.
        rate, flag: Names of its share of all samples, and of its mark on one, in NeMo RL's metrics; of finished ones.
    """

    kind: Kind
    title: str
    words: str
    by_environment: bool = False
    cut: bool = False
    whole_group: bool = False
    precedence: int = 0
    by_rewards: bool = False
    remedy: str = ""
    rate: str = ""
    flag: str = ""


_FINISHED = 2

ENDINGS: Final[Mapping[str, Ending]] = {
    "terminated": Ending(
        kind="finished",
        title="terminated",
        words="its environment ended the episode",
        by_environment=True,
        precedence=_FINISHED,
        rate="natural_termination_rate",
        flag="terminated",
    ),
    "truncated": Ending(
        kind="finished",
        title="truncated",
        words="a length limit cut it, which the policy reached",
        cut=True,
        precedence=_FINISHED,
        rate="truncation_rate",
        flag="truncated",
    ),
    "max_turns": Ending(
        kind="finished",
        title="max turns",
        words="it used up rollout.maxTurns",
        precedence=_FINISHED,
        rate="max_turns_reached_rate",
        flag="max_turns_reached",
    ),
    "failed": Ending(kind="failed", title="failed", words="it failed"),
    "oversampled": Ending(
        kind="dropped",
        title="oversampled",
        words="enough other samples of its group finished first",
        remedy="lower rollout.groups.oversample",
    ),
    "filtered": Ending(
        kind="dropped",
        title="filtered",
        words="its group was filtered out (rollout.groups.dropEqualRewards)",
        whole_group=True,
        precedence=1,
        by_rewards=True,
    ),
    # It counts although its trajectory has finished.
    "stale": Ending(
        kind="dropped",
        title="too old",
        words="its group is older than rollout.onPolicy.maxLag allows",
        whole_group=True,
        precedence=_FINISHED + 1,
        remedy="raise rollout.onPolicy.maxLag, or use onStale: Finish",
    ),
}
"""What is true of each outcome, in the order in which outcomes are listed."""

OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)

FINISHED: Final[Mapping[str, Ending]] = {name: ending for name, ending in ENDINGS.items() if ending.kind == "finished"}
"""The outcomes of finished trajectories, which exports and comparisons know."""

FAILED: Final = frozenset(name for name, ending in ENDINGS.items() if ending.kind == "failed")
"""The outcomes of trajectories that failed permanently."""

WHOLE_GROUP: Final = frozenset(name for name, ending in ENDINGS.items() if ending.whole_group)
"""Reasons for which a group is given up as a whole, and never run again."""

OVERRULING: Final = frozenset(
    name for name, ending in ENDINGS.items() if ending.kind == "dropped" and ending.precedence > _FINISHED
)
"""Reasons for which a line of a dropped trajectory counts although the trajectory has finished."""


def look(outcome: str) -> str:
    """How an outcome is shown, in a terminal and in a report: `plain`, `limit`, `failed` or `dropped`."""
    ending = ENDINGS[outcome]
    if ending.kind == "finished":
        return "plain" if ending.by_environment else "limit"
    return ending.kind


def is_cut(outcome: str) -> bool:
    """True if a length limit cut a trajectory with this outcome."""
    return ENDINGS[outcome].cut


def by_environment(outcome: str | None) -> bool:
    """True if the environment ended a trajectory with this outcome."""
    return outcome is not None and ENDINGS[outcome].by_environment
