"""Versions of the weights that sampled a run's tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.text import one_line

_MOST_VERSIONS = 24
_NUMBER = re.compile(r"(\d+)")


class VersionCounts:
    """Counts generated tokens and finished trajectories by policy version, for each environment."""

    def __init__(self) -> None:
        self._tokens: dict[str, Counter[str]] = {}
        self._trajectories: dict[str, Counter[str]] = {}
        self._several: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()

    def add(self, record: TrajectoryRecord) -> None:
        """Add the responses of a trajectory."""
        name = record.task_name
        tokens: Counter[str] = Counter()
        for message in record.messages:
            if not message.sampled:
                continue
            known = 0
            for version, start, end in message.policy_versions or ():
                tokens[version] += end - start
                known += end - start
            self._unknown[name] += len(message.token_ids) - known
        self._tokens.setdefault(name, Counter()).update(tokens)
        self._trajectories.setdefault(name, Counter()).update(tokens.keys())
        self._several[name] += len(tokens) > 1

    def of(self, environments: Sequence[str]) -> dict[str, Any]:
        """Counts of these environments together.

        `versions` are `[version, tokens, trajectories]` in ascending order, those with most tokens if there are many;
        `others` counts the tokens of the rest, `several` trajectories with more than one version, `unknown` tokens
        whose version is not stored.
        """
        tokens: Counter[str] = Counter()
        trajectories: Counter[str] = Counter()
        for name in environments:
            tokens.update(self._tokens.get(name, {}))
            trajectories.update(self._trajectories.get(name, {}))
        by_count = sorted(tokens, key=lambda version: (-tokens[version], _order(version)))
        shown = sorted(by_count[:_MOST_VERSIONS], key=_order)
        return {
            "versions": [(one_line(version, 40), tokens[version], trajectories[version]) for version in shown],
            "others": sum(tokens[version] for version in by_count[_MOST_VERSIONS:]),
            "several": sum(self._several[name] for name in environments),
            "unknown": sum(self._unknown[name] for name in environments),
        }


def _order(version: str) -> list[tuple[int, str]]:
    """Key that sorts numbers within names by their value: `b-2` before `b-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(version)]
