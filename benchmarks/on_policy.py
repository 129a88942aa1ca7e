"""A run that a trainer holds back, by `rollout.onPolicy`: lag, throughput and waste, in one table.

Run it: `python -m benchmarks.on_policy`. Real workers and journals, a simulated engine with heavy tails, and a trainer
that takes a while for each step, in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from kuberoll.trainer import Rollouts
from tests.trainer.on_policy import PacedRun, job, lags_of

REPEATS = 4
ENGINE = {"firstTokenSeconds": 0.05, "tokenSeconds": 0.0, "sigma": 1.0, "maxBatch": 4096}


class Measured(NamedTuple):
    """One line of the table.

    Attributes:
        rate: Taken trajectories per second.
        waited: Share of the time in which the trainer waited.
        waste: Share of the generated tokens that were dropped because they were too old.
        lags: Taken trajectories by their lag.
    """

    name: str
    rate: float
    waited: float
    waste: float
    lags: Counter[int]


async def measure(
    name: str, on_policy: dict[str, Any] | None, *, groups: int, steps: int, train_seconds: float, shards: int
) -> Measured:
    """Train for some steps, and count what comes after the first of them."""
    rollout: dict[str, Any] = {"concurrency": 512}
    if on_policy is not None:
        rollout["onPolicy"] = on_policy
    given = job(
        shards=shards,
        simulated=ENGINE,
        rollout=rollout,
        dataset={
            "source": {"generator": {"count": 4096}},
            "repeats": REPEATS,
            "epochs": None,
        },
    )
    with tempfile.TemporaryDirectory() as directory:
        async with PacedRun(Path(directory) / "run", given) as run:
            rollouts = run.open()
            lags: Counter[int] = Counter()
            loop = asyncio.get_running_loop()
            began, taken, waited = loop.time(), 0, 0.0
            asked = began
            step = 0
            async for batch in rollouts.batches_async(groups, timeout=120):
                now = loop.time()
                if step:
                    waited += now - asked
                    taken += len(batch)
                    lags.update(lags_of(batch, rollouts.version))
                else:
                    began = now
                await asyncio.sleep(train_seconds)
                await run.engine.load_weights(None, str(rollouts.version + 1))
                rollouts.published()
                step += 1
                asked = loop.time()
                if step > steps:
                    break
            seconds = loop.time() - began
            rollouts.stop()
            await run.kill()
            generated, wasted = tokens_of(run, rollouts)
    return Measured(name, taken / seconds, waited / seconds, wasted / max(1, generated), lags)


def tokens_of(run: PacedRun, rollouts: Rollouts) -> tuple[int, int]:
    """Generated tokens, of those that were taken or too old, and of the latter."""
    stale = {record.key: record.tokens.generated for record in run.dropped() if record.reason == "stale"}
    stored = {record.key: record.tokens.generated for record in run.stored()}
    return sum({**stored, **stale}.values()), sum(stale.values())


def line_of(found: Measured, rate: float) -> str:
    """A line of the table."""
    total = max(1, sum(found.lags.values()))
    shares = " ".join(f"{lag}: {100 * count / total:.0f} %" for lag, count in sorted(found.lags.items()))
    return (
        f"| {found.name} | {max(found.lags, default=0)} | {shares} | {found.rate / rate:.2f} "
        f"| {100 * found.waited:.0f} % | {100 * found.waste:.1f} % |"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=16, help="Prompt groups of a batch.")
    parser.add_argument("--steps", type=int, default=30, help="Steps of the trainer.")
    parser.add_argument("--train-seconds", type=float, default=0.5, help="Seconds of a step of the trainer.")
    parser.add_argument("--shards", type=int, default=2, help="Workers.")
    given = parser.parse_args()
    rules: list[tuple[str, dict[str, Any]]] = [
        (f"maxLag: {lag}, {on_stale}", {"maxLag": lag, "onStale": on_stale})
        for lag in (0, 1, 4)
        for on_stale in ("Finish", "Drop")
    ]
    rules.append(
        (
            f"maxLag: 4, Drop, maxAhead: {2 * given.groups}",
            {"maxLag": 4, "onStale": "Drop", "maxAhead": 2 * given.groups},
        )
    )
    rules.append((f"maxAhead: {2 * given.groups} alone", {"maxAhead": 2 * given.groups}))
    options = {
        "groups": given.groups, "steps": given.steps, "train_seconds": given.train_seconds, "shards": given.shards
    }  # fmt: skip
    found = [await measure(name, rule, **options) for name, rule in rules]
    print("| rollout.onPolicy | largest lag | taken trajectories by lag | rate | trainer waited | too old |")
    print("|---|---|---|---|---|---|")
    for one in found:
        print(line_of(one, found[0].rate))


if __name__ == "__main__":
    asyncio.run(main())
