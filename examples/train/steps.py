"""What is known of each step of the training: a line of `steps.jsonl`, a line on the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BAR = 24


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step; step 0 has no batch, and tells of the policy before the training.

    Attributes:
        version: Of the weights after the step.
        groups: Keys of the prompt groups of its batch.
        reward: Mean of its trajectories.
        lag: Versions between the oldest token of a trajectory and the newest weights, mean of its trajectories.
        most_lag: The most of them.
        tokens: Sampled tokens in it.
        stale_tokens: Sampled tokens of the run, until then, that became too old to learn from.
        waited, trained, published: Seconds.
        held_out: Mean reward of held-out puzzles with its weights; None: not measured.
    """

    step: int
    version: int
    groups: list[tuple[int, ...]]
    reward: float = 0.0
    lag: float = 0.0
    most_lag: int = 0
    tokens: int = 0
    stale_tokens: int = 0
    waited: float = 0.0
    trained: float = 0.0
    published: float = 0.0
    held_out: float | None = None

    def __str__(self) -> str:
        if not self.step:
            return f"before the training   held-out puzzles: reward {self.held_out:.3f}"
        filled = round(self.reward * BAR)
        line = (
            f"step {self.step:3}  reward {self.reward:.2f} {'█' * filled}{'·' * (BAR - filled)}"
            f"  lag {self.lag:.1f}, at most {self.most_lag}"
            f"  waited {self.waited:.1f} s, trained {self.trained:.1f} s, published {self.published:.1f} s"
        )
        return line if self.held_out is None else f"{line}\n          held-out puzzles: reward {self.held_out:.3f}"


def waste(steps: Sequence[Step]) -> float:
    """Share of the sampled tokens, so far, that became too old to learn from."""
    stale = steps[-1].stale_tokens if steps else 0
    return stale / max(1, stale + sum(step.tokens for step in steps))


def append(file: Path, step: Step) -> None:
    """Add a line for a step."""
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(step)) + "\n")


def read(file: Path, *, until: int | None = None) -> list[Step]:
    """The steps in order, of those that a killed trainer repeated the last; up to the step `until`."""
    if not file.exists():
        return []
    # What follows the last newline was not written whole.
    lines = file.read_text().split("\n")[:-1]
    found = {step.step: step for step in (Step(**json.loads(line)) for line in lines if line)}
    return [found[number] for number in sorted(found) if until is None or number <= until]
