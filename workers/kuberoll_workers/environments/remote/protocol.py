"""The protocol between workers and environment servers, over HTTP: docs/reference/environment-protocol.md.

The bodies are those of `messages`, each request at the path of its method.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.interface import Recovery

VERSION: Final = 2
PREFIX: Final = "/v1"
HEALTH: Final = "/healthz"

TIMEOUT_HEADER: Final = "Kuberoll-Timeout"
"""Header of a request: seconds that the environment is given, once the call has begun."""

CALL_HEADER: Final = "Kuberoll-Call"
"""Header of a call, and of its answer: an id that the answer repeats."""

STATUS_FAULT: Final = 422
"""Status of an answer whose body is a `Fault`: the environment failed, and the server is well."""
STATUS_BUSY: Final = 503
"""Status of a call that was not begun and may be sent again, to this server or to another."""


class Info(msgspec.Struct):
    """Answer of `GET /v1/info`.

    Attributes:
        name: Name of the environment, for messages.
        reset, close, shutdown, recovery, score_group, declares_tools, trials: See `Hooks`.
        parallel: Number of calls that are worth sending at a time.
        digest: Digest of the environment's code; None: unknown.
    """

    protocol: int
    name: str = ""
    reset: bool = False
    close: bool = False
    shutdown: bool = False
    recovery: Recovery = "metadata"
    score_group: bool = False
    declares_tools: bool = False
    trials: bool = False
    parallel: int = 1
    digest: str | None = None

    @property
    def hooks(self) -> Hooks:
        return Hooks(
            reset=self.reset,
            close=self.close,
            shutdown=self.shutdown,
            recovery=self.recovery,
            score_group=self.score_group,
            declares_tools=self.declares_tools,
            trials=self.trials,
        )
