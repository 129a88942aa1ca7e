"""What the environment tests share."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from kuberoll_workers.environments import EnvironmentInterface

SERVED = frozenset({"judge", "judge_pairs", "reward_model"})
"""Built-ins whose steps need a served model: their own tests have one."""

CONFIGS: Mapping[str, Mapping[str, Any]] = {"reward_model": {"url": "http://127.0.0.1:9"}}
"""Configs of built-ins that have no default for all of it."""


def log_of(reply: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a prompt"}, {"role": "assistant", "content": reply}]


def step_one(environment: EnvironmentInterface, reply: str, metadata: dict[str, Any] | None) -> Any:
    """The EnvironmentReturn of a batch of one, checked for what every environment promises."""
    return step_all(environment, [reply], [metadata])


def step_all(environment: EnvironmentInterface, replies: list[str], metadata: list[dict[str, Any] | None]) -> Any:
    logs = [log_of(reply) for reply in replies]
    before = copy.deepcopy((logs, metadata))
    result = environment.step(logs, metadata)
    assert (logs, metadata) == before, "step changed its inputs"
    assert all(len(column) == len(replies) for column in result if column is not None)
    json.dumps(result.metadata, allow_nan=False)
    assert json.loads(json.dumps(result.metadata)) == result.metadata
    return result
