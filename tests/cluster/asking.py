"""An environment that says what it was given, and what the policy answers it."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from kuberoll_workers.environments import policy_endpoint
from kuberoll_workers.environments.interface import EnvironmentInterface, EnvironmentReturn

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
WEIGHTS = {"uri": "/tmp/none", "version": "9"}


class Asking(EnvironmentInterface[Any]):
    """One turn; what it found is the state of its trajectory.

    Args:
        config: With `asks: true` it sends requests to the policy.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._asks = bool((config or {}).get("asks"))

    def step(self, message_log_batch: list[Any], metadata: Any) -> EnvironmentReturn:
        found: dict[str, Any] = {"variables": sorted(name for name in os.environ if name.startswith("KUBEROLL_POLICY"))}
        if self._asks:
            found |= {"chat": status("/chat/completions", CHAT), "weights": status("/weights", WEIGHTS)}
        size = len(message_log_batch)
        empty = [{"role": "environment", "content": ""}] * size
        return EnvironmentReturn(empty, [found] * size, None, [0.0] * size, [True] * size)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


def status(path: str, body: object) -> int:
    """The policy's answer to a request with the environment's own token."""
    policy = policy_endpoint()
    headers = {"authorization": f"Bearer {policy.token}", "content-type": "application/json"}
    request = urllib.request.Request(policy.url + path, data=json.dumps(body).encode(), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
