"""Types of environments, apart from their model: it takes processes of environments longer to import than the rest."""

from __future__ import annotations

from typing import Final, Literal

BuiltInEnvironment = Literal[
    "blackjack",
    "calculator",
    "code_execution",
    "code_jaccard",
    "grid_world",
    "judge",
    "judge_pairs",
    "math",
    "multiple_choice",
    "reward_model",
    "sliding_puzzle",
    "sqlite",
    "string_match",
]

LibraryEnvironment = Literal[
    "gymnasium", "mcp", "nemo_gym", "openenv", "reasoning_gym", "skyrl_gym", "textarena", "verifiers"
]
"""Environments of other libraries, each in an extra of its own."""

EnvironmentType = Literal[BuiltInEnvironment, LibraryEnvironment]

AGENT_TYPE: Final = "agent"
"""Type of the class that runs an environment's agent; it is not a value of `type`."""

GYM_AGENT_TYPE: Final = "nemo_gym_agent"
"""Type of the class that sends an environment's rows to agent servers of NeMo Gym; it is not a value of `type`."""

SANDBOX_AGENT_TYPE: Final = "sandbox_agent"
"""Type of the class that runs an environment's agent in sandboxes; it is not a value of `type`."""
