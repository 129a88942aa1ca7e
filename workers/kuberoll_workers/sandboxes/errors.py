"""Errors of sandboxes."""

from __future__ import annotations

from kuberoll_workers.data.causes import Evidence, error_name
from kuberoll_workers.environments.interface import Unavailable


class SandboxError(Unavailable):
    """A sandbox cannot do what was asked."""

    reason = "SandboxUnavailable"


class SandboxLost(SandboxError):
    """The sandbox is gone, or does not answer: through no fault of the policy, whose trajectory starts over."""

    reason = "SandboxLost"


class SandboxUnavailable(SandboxError):
    """No sandbox can be made here; the message names what is missing and the way out."""


class CommandNotStarted(SandboxError):
    """A command could not be started.

    Attributes:
        errno: Why, as the system says it; 0: unknown.
    """

    reason = "EnvironmentRaised"

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message, evidence=Evidence(error=error_name(errno)))
        self.errno = errno
