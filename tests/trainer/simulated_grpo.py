"""A simulated GRPO: a policy whose chances are known, faults that remove some of what it does, and a real run's files.

The policy has one parameter, how often it thinks long. Long trajectories are right less often than short ones, so
that the true gradient is negative, and wrong ones take more turns. What a run stores of them is written line by line,
and read by the trainer's own code (groups, batches, advantages) and by the aggregates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from kuberoll.trainer import Rollouts
from kuberoll.trainer.advantages import BY_NAME, AdvantageName
from kuberoll.trainer.batch import Batch, make_batch
from kuberoll_workers.analysis.aggregation.aggregates import aggregate
from kuberoll_workers.analysis.removal import Removal
from kuberoll_workers.data.causes import REASONS
from kuberoll_workers.data.record import AnyRecord, TokenCounts, encode_line
from kuberoll_workers.output.run_files import RunFiles
from tests.output import support
from tests.trainer.support import WrittenRun, trajectory

Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

Fault = Literal["none", "start", "end", "anywhere", "running", "limit", "wrong"]
FAULTS: Final[dict[Fault, str]] = {
    "none": "none",
    "start": "no machine could be had: before the first turn, all alike",
    "end": "the grader was out of reach: at the end, all alike",
    "anywhere": "in any turn of its own, all trajectories alike",
    "running": "engines are lost at random moments: in each turn alike",
    "limit": "a time limit of 12 turns",
    "wrong": "the grader crashes, four times as often on wrong answers",
}
"""What removes some ten in a hundred trajectories."""

Treatment = Literal["short", "masked", "scored"]
"""What is done with a group that lost some: trained on what is left, left out whole, or what was removed scores 0."""

SAMPLES: Final = 8
LIMIT: Final = 12
_LESS: Final = 0.08
_SHARE: Final = 0.1
_LOST_IN_A_TURN: Final = 0.0178
"""So that a tenth is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What the policy did, each array [prompts, samples].

    Attributes:
        long: True where it thought long.
        right: True for a reward of 1.
        turns: Turns that it would take.
        removed: True where a fault removes it, in turn `reached`.
        chance: Of thinking long.
    """

    long: Booleans
    right: Booleans
    turns: Integers
    removed: Booleans
    reached: Integers
    chance: float


def true_gradient(chance: float) -> float:
    """Derivative of the expected reward by the logit of thinking long."""
    return chance * (1 - chance) * -_LESS


def play(seed: int, fault: Fault, *, prompts: int, chance: float = 0.5) -> Played:
    """What the policy does with a seed, the same whatever the faults are."""
    random = np.random.default_rng(seed)
    shape = prompts, SAMPLES
    short_right = random.uniform(0.4, 0.8, prompts)[:, None]
    long = random.random(shape) < chance
    right = random.random(shape) < short_right - _LESS * long
    least = np.where(long, np.where(right, 5, 7), np.where(right, 1, 2))
    most = np.where(long, np.where(right, 9, 16), np.where(right, 4, 6))
    turns = random.integers(least, most + 1)
    removed, reached = _struck(np.random.default_rng([seed, 1]), fault, right, turns)
    return Played(long=long, right=right, turns=turns, removed=removed, reached=reached, chance=chance)


def _struck(random: np.random.Generator, fault: Fault, right: Booleans, turns: Integers) -> tuple[Booleans, Integers]:
    alike = random.random(turns.shape)
    match fault:
        case "none":
            return np.zeros_like(right), turns
        case "start":
            return alike < _SHARE, np.zeros_like(turns)
        case "end":
            return alike < _SHARE, turns
        case "anywhere":
            return alike < _SHARE, random.integers(1, turns + 1)
        case "running":
            turn = random.geometric(_LOST_IN_A_TURN, turns.shape)
            return turn <= turns, turn
        case "limit":
            return turns > LIMIT, np.full_like(turns, LIMIT)
        case "wrong":
            return alike < np.where(right, 0.043, 0.172), turns


_REASONS: Final = {
    "start": "SandboxUnavailable",
    "end": "DependencyUnavailable",
    "anywhere": "SandboxLost",
    "running": "SandboxLost",
    "limit": "TrajectoryDeadline",
    "wrong": "EnvironmentCrashed",
}


def lines(played: Played, fault: Fault, treatment: Treatment) -> Iterator[AnyRecord]:
    """What a run stores."""
    masked = [treatment == "masked" and bool(own.any()) for own in played.removed]
    for task, rollout in np.ndindex(played.turns.shape):
        lost = bool(played.removed[task, rollout])
        if masked[task] or (lost and treatment != "scored"):
            turns = int((played.reached if lost else played.turns)[task, rollout])
            reason = _REASONS[fault]
            yield support.failure(
                task,
                rollout,
                kind=REASONS[reason].kind,
                reason=reason,
                stage="environment" if lost else "group",
                turn_count=turns,
                tokens=50 * turns,
            )
        else:
            turns = int((played.reached if lost else played.turns)[task, rollout])
            reward = float(played.right[task, rollout] and not lost)
            tokens = TokenCounts(2, 50 * turns, 0)
            yield trajectory(task, rollout, reward, turn_count=turns, tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a trainer has of one run.

    Attributes:
        advantages: [prompts, samples]; NaN where there is no row.
        gradient: Mean over the rows of advantage times the derivative of the log-probability.
    """

    advantages: Floats
    gradient: float


class SimulatedRun:
    """A run with the trajectories that faults left, in a directory of its own."""

    def __init__(self, directory: Path, played: Played, fault: Fault, treatment: Treatment = "short") -> None:
        prompts = len(played.turns)
        self._played = played
        self._run = WrittenRun(
            directory, groups=prompts, repeats=SAMPLES, **{"rollout.groups.atomic": treatment == "masked"}
        )
        stored: dict[str, list[bytes]] = {}
        for record in lines(played, fault, treatment):
            stored.setdefault(self._run.journal_of(record), []).append(encode_line(record))
        for journal, own in stored.items():
            (directory / f"{journal}.jsonl").write_bytes(b"".join(own))
        self._groups = [
            group
            for batch in Rollouts.open(str(directory)).batches(prompts, advantages=None, wait=False)
            for group in batch.groups
        ]

    def step(self, advantages: AdvantageName) -> Step:
        """A batch of all groups, with the advantages of the trainer."""
        batch = make_batch(self._groups, advantages=BY_NAME[advantages], pad_id=0)
        assert batch.advantages is not None
        found = np.full(self._played.turns.shape, np.nan)
        found[batch.task_index, batch.rollout_index] = batch.advantages
        return Step(advantages=found, gradient=self._gradient(batch))

    def _gradient(self, batch: Batch) -> float:
        assert batch.advantages is not None
        score = self._played.long[batch.task_index, batch.rollout_index] - self._played.chance
        return float(np.mean(batch.advantages * score))

    def removal(self) -> Removal | None:
        """What the aggregates say of it."""
        return aggregate([RunFiles(str(self._run.path))]).removals.get("env")


def train(
    directory: Path, fault: Fault, treatment: Treatment, *, seed: int, steps: int, prompts: int, rate: float
) -> float:
    """The chance of thinking long after some steps of gradient ascent; 0.5 before them."""
    logit = 0.0
    for step in range(steps):
        played = play(1000 * seed + step, fault, prompts=prompts, chance=1 / (1 + float(np.exp(-logit))))
        logit += rate * SimulatedRun(directory / str(step), played, fault, treatment).step("grpo").gradient
    return 1 / (1 + float(np.exp(-logit)))
