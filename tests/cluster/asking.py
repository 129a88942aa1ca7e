"""An environment that says what it was given, and what the policy answers it."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

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
            found["session"] = session()
        size = len(message_log_batch)
        empty = [{"role": "environment", "content": ""}] * size
        return EnvironmentReturn(empty, [found] * size, None, [0.0] * size, [True] * size)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


def status(path: str, body: object) -> int:
    """The policy's answer to a request with the environment's own token."""
    policy = policy_endpoint()
    return ask(policy.url + path, policy.token, body)[0]


def session() -> dict[str, Any]:
    """What became of an agent's session: where its URLs lead, and the answers there to its own token."""
    policy = policy_endpoint()
    endpoint = policy.url.removesuffix("/v1")
    opened, given = ask(f"{endpoint}/sessions", policy.token, {})
    chat, _ = ask(f"{given['openai_base_url']}/chat/completions", given["token"], CHAT)
    elsewhere, _ = ask(f"{endpoint}/v1/chat/completions", given["token"], CHAT)
    closed, ended = ask(given["url"], given["token"], method="DELETE")
    return {
        "answers": [opened, chat, elsewhere, closed],
        "calls": len(ended["trajectories"]),
        "own": urlsplit(given["url"]).hostname != urlsplit(endpoint).hostname,
    }


def ask(url: str, token: str | None, body: object = None, method: str = "POST") -> tuple[int, Any]:
    """Status and body of an answer."""
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status), json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, None
