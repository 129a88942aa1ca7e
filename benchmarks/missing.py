"""A simulated GRPO with faults that remove a tenth of its trajectories, beside the same seeds without them.

Run it: `python -m benchmarks.missing`. Chances are known, and what the faults leave goes through the trainer's own
groups, batches and advantages, and through the aggregates (tests/trainer/simulated_grpo.py). It prints by how much
advantages and gradients differ from the run without faults, what the tests of the aggregates say of each run, and
where training ends.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from kuberoll.trainer.advantages import AdvantageName
from kuberoll_workers.analysis.statistics import run_mean
from tests.trainer.simulated_grpo import FAULTS, Fault, SimulatedRun, Treatment, play, train

FUNCTIONS: Final[tuple[AdvantageName, ...]] = ("rloo", "dr_grpo", "grpo")
CASES: Final[tuple[tuple[Fault, Treatment], ...]] = (
    *((fault, "short") for fault in FAULTS if fault != "none"),
    ("start", "masked"),
    ("limit", "masked"),
    ("limit", "scored"),
)


def interval(values: Sequence[float], *, scale: float = 1.0, digits: int = 4) -> str:
    """Mean and 95 % interval."""
    found = run_mean([scale * value for value in values if np.isfinite(value)])
    if found.mean is None or found.low is None or found.high is None:
        return "–"
    return f"{found.mean:+.{digits}f} ({found.low:+.{digits}f} to {found.high:+.{digits}f})"


class Differences:
    """What a case has beside the runs of the same seeds without faults, one value for each seed.

    Attributes:
        removed: Share of the trajectories.
        verdicts: Of the aggregates.
        advantages: Mean difference of the kept ones, by function and of which: `all`, `right`, `wrong`.
        gradients: Difference by function.
    """

    def __init__(self) -> None:
        self.removed: list[float] = []
        self.verdicts: Counter[str] = Counter()
        self.advantages: dict[tuple[str, str], list[float]] = {}
        self.gradients: dict[str, list[float]] = {}


def compare(seeds: int, prompts: int) -> tuple[dict[tuple[Fault, Treatment], Differences], dict[str, float]]:
    """The differences of all cases, and the mean gradient without faults by function."""
    found = {case: Differences() for case in CASES}
    plain_gradients: dict[str, list[float]] = {name: [] for name in FUNCTIONS}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as directory:
            plain = SimulatedRun(Path(directory) / "plain", play(seed, "none", prompts=prompts), "none")
            whole = {name: plain.step(name) for name in FUNCTIONS}
            for name, step in whole.items():
                plain_gradients[name].append(step.gradient)
            for number, ((fault, treatment), own) in enumerate(found.items()):
                played = play(seed, fault, prompts=prompts)
                run = SimulatedRun(Path(directory) / str(number), played, fault, treatment)
                own.removed.append(float(played.removed.mean()))
                if (removal := run.removal()) is not None:
                    own.verdicts[removal.verdict] += 1
                for name, step in whole.items():
                    other = run.step(name)
                    own.gradients.setdefault(name, []).append(other.gradient - step.gradient)
                    difference = other.advantages - step.advantages
                    for which, of in (("all", played.right | True), ("right", played.right), ("wrong", ~played.right)):
                        own.advantages.setdefault((name, which), []).append(float(np.nanmean(difference[of])))
    return found, {name: float(np.mean(values)) for name, values in plain_gradients.items()}


def print_differences(found: dict[tuple[Fault, Treatment], Differences], plain: dict[str, float]) -> None:
    """Print the tables of `compare`."""
    names = FUNCTIONS
    print("gradients without faults:", ", ".join(f"{name} {value:+.4f}" for name, value in plain.items()))
    print("\n| what removes | removed | " + " | ".join(f"advantages by `{name}`" for name in names) + " |")
    print("|---" * (2 + len(names)) + "|")
    for (fault, treatment), own in found.items():
        cells = [interval(own.advantages[name, "all"]) for name in names]
        print(f"| {FAULTS[fault]}: {treatment} | {np.mean(own.removed):.1%} | {' | '.join(cells)} |")
    print("\n| what removes | " + " | ".join(f"`{name}`: right, wrong" for name in names) + " |")
    print("|---" * (1 + len(names)) + "|")
    for (fault, treatment), own in found.items():
        cells = [", ".join(interval(own.advantages[name, which]) for which in ("right", "wrong")) for name in names]
        print(f"| {FAULTS[fault]}: {treatment} | {' | '.join(cells)} |")
    print("\n| what removes | " + " | ".join(f"gradient by `{name}`, % of that without" for name in names) + " |")
    print("|---" * (1 + len(names)) + "|")
    for (fault, treatment), own in found.items():
        cells = [interval(own.gradients[name], scale=100 / abs(plain[name]), digits=1) for name in names]
        print(f"| {FAULTS[fault]}: {treatment} | {' | '.join(cells)} |")
    verdicts = ("longer", "exposed", "none", "unclear")
    print("\n| what removes | " + " | ".join(verdicts) + " |")
    print("|---" * (1 + len(verdicts)) + "|")
    for (fault, treatment), own in found.items():
        total = own.verdicts.total()
        cells = [f"{own.verdicts[verdict] / total:.1%}" if total else "–" for verdict in verdicts]
        print(f"| {FAULTS[fault]}: {treatment} | {' | '.join(cells)} |")


def print_trainings(trainings: int, steps: int, prompts: int, rate: float) -> None:
    """Print where training ends."""
    print(f"\n| what removes | long after {steps} steps, of 0.5 |")
    print("|---|---|")
    for fault, treatment in (("none", "short"), *CASES):
        ends = []
        for seed in range(trainings):
            with tempfile.TemporaryDirectory() as directory:
                ends.append(
                    train(Path(directory), fault, treatment, seed=seed, steps=steps, prompts=prompts, rate=rate)
                )
        print(f"| {FAULTS[fault]}: {treatment} | {interval(ends, digits=2)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--trainings", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", type=float, default=3.0)
    options = parser.parse_args()
    print_differences(*compare(options.seeds, options.prompts))
    print_trainings(options.trainings, options.steps, options.prompts // 2, options.rate)


if __name__ == "__main__":
    main()
