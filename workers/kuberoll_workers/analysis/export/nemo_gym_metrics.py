"""NeMo Gym's aggregate metrics of rollouts: for each agent, over all of them and by task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kuberoll_workers.analysis.export.nemo_gym import numbers_of
from kuberoll_workers.data.gym_requests import AGENT, ROLLOUT, TASK

Numbers = Mapping[str, float]


class GymMetrics:
    """Numbers of rollouts, about 200 bytes each, and Gym's statistics of them.

    The statistics are those that Gym computes for agents without statistics of their own: mean, max, min, median and
    standard deviation (that of a sample; 0 where there is only one) of every numeric field of a rollout.
    """

    def __init__(self) -> None:
        self._agents: dict[str, dict[int, list[tuple[int, Numbers]]]] = {}

    def add(self, result: Mapping[str, Any]) -> None:
        """Take the numbers of a finished rollout."""
        tasks = self._agents.setdefault(result[AGENT]["name"], {})
        tasks.setdefault(result[TASK], []).append((result[ROLLOUT], numbers_of(result)))

    def entries(self) -> list[dict[str, Any]]:
        """Content of `_aggregate_metrics.json`: one entry for each agent."""
        return [_entry(name, tasks) for name, tasks in sorted(self._agents.items())]


def logged(entries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers under the names by which Gym logs them to W&B."""
    found: dict[str, float] = {}
    for entry in entries:
        name = entry[AGENT]["name"]
        found |= {f"{name}/{key}": value for key, value in entry["agent_metrics"].items()}
        found |= {f"key_metrics/{name}/{key}": value for key, value in entry["key_metrics"].items()}
    return found


def _entry(name: str, tasks: Mapping[int, Sequence[tuple[int, Numbers]]]) -> dict[str, Any]:
    ordered = {task: sorted(tasks[task], key=lambda rollout: rollout[0]) for task in sorted(tasks)}
    whole = _described([numbers for rollouts in ordered.values() for _, numbers in rollouts])
    return {
        AGENT: {"name": name},
        "agent_metrics": whole,
        "key_metrics": {key: value for key, value in whole.items() if key.startswith("mean/")},
        "group_level_metrics": [_group(task, rollouts) for task, rollouts in ordered.items()],
    }


def _group(task: int, rollouts: Sequence[tuple[int, Numbers]]) -> dict[str, Any]:
    return {
        TASK: task,
        **_described([numbers for _, numbers in rollouts]),
        # As in Gym, whose agents are sent no more than the numbers.
        "sample": {AGENT: {"name": "agent"}},
        "num_rollouts": len(rollouts),
        "expected_num_rollouts": len(rollouts),
        "missing_num_rollouts": 0,
        "reward_profile_completion_pct": 100.0,
        "rollout_infos": [
            {"rollout_id": f"{task}:{index}", TASK: task, ROLLOUT: index, **numbers} for index, numbers in rollouts
        ],
    }


def _described(rollouts: Sequence[Numbers]) -> dict[str, float]:
    names = {name: None for numbers in rollouts for name in numbers}
    columns = {name: np.array([numbers[name] for numbers in rollouts if name in numbers], float) for name in names}
    spread = any(len(values) > 1 for values in columns.values())
    described: dict[str, float] = {}
    for name, values in columns.items():
        described |= {
            f"mean/{name}": float(values.mean()),
            f"max/{name}": float(values.max()),
            f"min/{name}": float(values.min()),
            f"median/{name}": float(np.median(values)),
        }
        if len(values) > 1:
            described[f"std/{name}"] = float(values.std(ddof=1))
        elif not spread and len(values) == len(rollouts):
            described[f"std/{name}"] = 0.0
    return described
