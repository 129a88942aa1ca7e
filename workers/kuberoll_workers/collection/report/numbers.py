"""The numbers of a run as its report shows them, by environment; rows go through one at a time."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kuberoll_workers.collection.report.histogram import Histogram
from kuberoll_workers.collection.report.row import Row
from kuberoll_workers.collection.report.spread import Spread
from kuberoll_workers.collection.report.text import one_line

_MOST_CAUSES = 1000
_TOLD_CAUSES = 50
_CAUSE_LENGTH = 300

Cause = tuple[str, str, str]


class EnvironmentNumbers:
    """What trajectories of one environment, or of several, come to. Bounded, but for the rewards of groups."""

    def __init__(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._causes: Counter[Cause] = Counter()
        self._other_causes = 0
        self._histograms = {
            "reward": Histogram(),
            "turns": Histogram(finest=0),
            "generated": Histogram(finest=0),
            "prompt": Histogram(finest=0),
            "observed": Histogram(finest=0),
            "generation_seconds": Histogram(),
            "environment_seconds": Histogram(),
        }

    def add(self, row: Row) -> None:
        """Take one row; only finished trajectories count in what is told of rewards, turns, tokens and seconds."""
        self._outcomes[row.outcome] += 1
        if row.cause is not None:
            kind, stage, cause = row.cause
            self._count_cause((kind, stage, one_line(cause, _CAUSE_LENGTH)), 1)
        if row.reward is None or row.generation_seconds is None or row.environment_seconds is None:
            return
        values = {
            "reward": row.reward,
            "turns": row.turns,
            "generated": row.generated_tokens,
            "prompt": row.prompt_tokens,
            "observed": row.environment_tokens,
            "generation_seconds": row.generation_seconds,
            "environment_seconds": row.environment_seconds,
        }
        for name, value in values.items():
            self._histograms[name].add(value)

    def merge(self, other: EnvironmentNumbers) -> None:
        """Take the rows of another one too."""
        self._outcomes.update(other._outcomes)
        self._other_causes += other._other_causes
        for cause, count in other._causes.items():
            self._count_cause(cause, count)
        for name, histogram in self._histograms.items():
            histogram.merge(other._histograms[name])

    def _count_cause(self, cause: Cause, count: int) -> None:
        if cause in self._causes or len(self._causes) < _MOST_CAUSES:
            self._causes[cause] += count
        else:
            self._other_causes += count

    def as_json(self) -> dict[str, Any]:
        """Counts by outcome and cause, and each histogram by name."""
        by_count = sorted(self._causes.items(), key=lambda item: (-item[1], item[0]))
        told = [(*cause, count) for cause, count in by_count[:_TOLD_CAUSES]]
        return {
            "finished": self._histograms["turns"].count,
            "outcomes": dict(self._outcomes),
            "causes": told,
            "other_causes": self._other_causes + sum(count for _, count in by_count[_TOLD_CAUSES:]),
            **{name: histogram.as_json() for name, histogram in self._histograms.items()},
        }


class RunNumbers:
    """The numbers of a run: of every environment, and of all together where there are several."""

    def __init__(self) -> None:
        self._numbers: dict[str, EnvironmentNumbers] = {}
        self._spreads: dict[str, Spread] = {}

    def add(self, row: Row) -> None:
        """Take one row."""
        if row.environment not in self._numbers:
            self._numbers[row.environment] = EnvironmentNumbers()
            self._spreads[row.environment] = Spread()
        self._numbers[row.environment].add(row)
        if row.reward is not None and row.generation_seconds is not None:
            self._spreads[row.environment].add(row.key.task_index, row.reward)

    @property
    def environments(self) -> list[str]:
        return sorted(self._numbers)

    def as_json(self) -> dict[str, Any]:
        """`{"all": …, "environments": [{"name": …}, …]}`, each with its numbers and its `groups`."""
        everything, spread = EnvironmentNumbers(), Spread()
        listed = []
        for name in self.environments:
            everything.merge(self._numbers[name])
            spread.extend(self._spreads[name])
            listed.append({"name": name, **self._numbers[name].as_json(), "groups": self._spreads[name].as_json()})
        groups = spread.as_json()
        # What is highest is another reward in each environment.
        for bound in ("highest", "lowest"):
            groups[bound] = sum(item["groups"][bound] for item in listed)
        return {"all": {"name": "", **everything.as_json(), "groups": groups}, "environments": listed}
