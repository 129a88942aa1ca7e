"""Requests as NeMo Gym has them: names of its fields, and parameters of the Responses API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import orjson

TASK: Final = "_ng_task_index"
ROLLOUT: Final = "_ng_rollout_index"
"""Fields by which Gym counts rollouts."""

AGENT: Final = "agent_ref"
PARAMS: Final = "responses_create_params"

FAILURE: Final = "_ng_failure_class"
TERMINAL: Final = "_ng_failure_terminal"
"""Fields of a rollout that failed, and of one that is not to be tried again."""

STATE: Final = "nemo_gym"
"""Field of a trajectory's metadata with what servers of Gym have told of it."""

# Parameters of the Responses API that Gym's own model of a request has; it refuses any other.
_REQUEST = frozenset(
    {
        "background", "include", "input", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model",
        "parallel_tool_calls", "previous_response_id", "prompt", "reasoning", "service_tier", "store", "temperature",
        "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user", "stream",
    }
)  # fmt: skip
_OUR_NAMES = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}


def request_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a request, with those that Gym's model of it does not have in `metadata.extra_body`."""
    named = {_OUR_NAMES.get(name, name): value for name, value in params.items()}
    known = {name: value for name, value in named.items() if name in _REQUEST}
    further = {name: value for name, value in named.items() if name not in _REQUEST and value is not None}
    if not further:
        return known
    metadata = dict(known.get("metadata") or {})
    extra = orjson.loads(metadata.get("extra_body") or "{}") | further
    # Python's form, as Gym writes it.
    return {**known, "metadata": {**metadata, "extra_body": json.dumps(extra)}}


def agent_ref(name: str) -> dict[str, str]:
    """Gym's reference to an agent server."""
    return {"type": "responses_api_agents", "name": name}
