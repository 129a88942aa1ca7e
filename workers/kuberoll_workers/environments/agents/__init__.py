"""Agents: functions and programs that call the policy by themselves, each trajectory in a session of its own."""

from kuberoll_workers.environments.agents.episode import AgentEpisode, AgentResult

__all__ = ["AgentEpisode", "AgentResult"]
