"""What NeMo Gym's agent servers are sent of a finished run, to compute aggregate metrics of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kuberoll_workers.data.gym_requests import AGENT, PARAMS, ROLLOUT, STATE, TASK, agent_ref

Results = dict[str, list[dict[str, Any]]]
"""Results of rollouts, by agent."""


def results_by_agent(
    states: Sequence[Mapping[str, Any] | None], tasks: Sequence[int], rollouts: Sequence[int]
) -> Results:
    """Results of finished trajectories, by agent, in the order of tasks and rollouts.

    As from Gym's own rollout collection, the heavy parts are left out: the request, and the response but for its usage.

    Args:
        states: Metadata of each trajectory, as `gym_trajectory` makes it.
        tasks, rollouts: Its numbers.
    """
    found: Results = {}
    for task, rollout, state in sorted(zip(tasks, rollouts, states, strict=True), key=lambda item: item[:2]):
        if state is None or STATE not in state:
            continue
        answer = state[STATE]
        told = {name: state[name] for name in answer["echoed"] if name in state} | answer["verification"]
        usage = answer["response"].get("usage")
        result = {
            **{name: value for name, value in told.items() if name != PARAMS},
            **({"response": {"usage": usage}} if usage else {}),
            TASK: task,
            ROLLOUT: rollout,
            AGENT: agent_ref(answer["agent"]),
        }
        found.setdefault(answer["agent"], []).append(result)
    return found


def metrics_of(agent: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics in an agent server's answer, under the names by which Gym logs them.

    Those by task are left out: they are as large as the run.
    """
    parts = {agent: answer.get("agent_metrics"), f"key_metrics/{agent}": answer.get("key_metrics")}
    return {f"{prefix}/{name}": value for prefix, metrics in parts.items() for name, value in (metrics or {}).items()}
