"""Errors of sandboxes."""

from __future__ import annotations


class SandboxError(Exception):
    """A sandbox cannot do what was asked."""


class SandboxLost(SandboxError):
    """The sandbox is gone, or does not answer: through no fault of the policy, whose trajectory starts over."""


class SandboxUnavailable(SandboxError):
    """No sandbox can be made here; the message names what is missing and the way out."""


class CommandNotStarted(SandboxError):
    """A command could not be started.

    Attributes:
        errno: Why, as the system says it; 0: unknown.
    """

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno
