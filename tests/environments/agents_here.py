"""Agents of programs that are run without a policy, as the loop runs them: by the environment, in an isolation."""

from __future__ import annotations

import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from kuberoll_api.model.environments import Environment
from kuberoll_workers.environments.agents import AgentEpisode
from kuberoll_workers.environments.agents.request import AgentRequest
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.outcome import EnvironmentFault, StepOutcome
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner

NOWHERE = "http://127.0.0.1:9/sessions/none/v1"


def request(name: str, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state of an episode whose session is nowhere."""
    return AgentRequest(
        id=name,
        metadata=metadata or {},
        tools=None,
        seed=1,
        base_url=NOWHERE,
        anthropic_base_url=NOWHERE,
        token="a token",
        model="none",
    ).encode()


async def proxied(episode: AgentEpisode) -> float:
    """1.0 if clients that read the usual variables would use a proxy for the session."""
    return float(not urllib.request.proxy_bypass(str(urlsplit(episode.base_url).hostname)))


async def play(
    agent: dict[str, Any],
    states: Sequence[dict[str, Any]],
    *,
    isolation: str = "Process",
    processes: int = 1,
    files: ProcessAccess | None = None,
) -> list[StepOutcome | EnvironmentFault]:
    """Outcomes of episodes, one call for each; with one process, one after the other."""
    spec = Environment.model_validate({"name": "env", "agent": agent, "isolation": isolation})
    executor = make_executor(
        PlainSpec.of(spec), isolation=isolation, processes=processes, timeout=spec.call_seconds, access=files
    )
    runner = EnvironmentRunner(executor, max_batch=1)
    try:
        found = await runner.step_batch([[{"role": "user", "content": "hi"}]] * len(states), list(states))
        return [item if isinstance(item, StepOutcome) else _fault(item) for item in found]
    finally:
        await runner.close()


def _fault(found: BaseException) -> EnvironmentFault:
    assert isinstance(found, EnvironmentFault), found
    return found
