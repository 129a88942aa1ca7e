"""Settings of the server inside a sandbox, from the variable KUBEROLL_SANDBOX."""

from __future__ import annotations

import json
import os
from typing import Any, Final, NamedTuple

VARIABLE: Final = "KUBEROLL_SANDBOX"
"""Variable that has them, as an object of JSON. Nothing in it is secret."""


class Settings(NamedTuple):
    """Settings of the server.

    Attributes:
        name: The sandbox's name, which a handle must know.
        certificate: Certificate (PEM) of the handles that it obeys: the sandbox has no key.
        descriptor: A listening socket that it was started with; None: it listens at `path` or `port`.
        path: Path of a Unix socket.
        port: TCP port, on all addresses.
        user: Whom commands run as, `name`, `uid`, `name:group` or `uid:gid`; empty: as the server does.
        workdir: Working directory of commands.
        environment: Variables of commands.
        lease_seconds: The server ends, and with it the sandbox, when no handle has been heard of for so long.
        start_seconds: The same for the first one.
        total_seconds: It ends after this time in any case.
    """

    name: str
    certificate: str
    descriptor: int | None = None
    path: str | None = None
    port: int | None = None
    user: str = ""
    workdir: str = "/"
    environment: dict[str, str] = {}  # noqa: RUF012 - a default is never changed
    lease_seconds: float = 60.0
    start_seconds: float = 600.0
    total_seconds: float = 86_400.0

    @classmethod
    def of(cls, text: str) -> Settings:
        """Read the settings; unknown ones are those of a newer release, and wrong."""
        return cls(**json.loads(text))

    def encode(self) -> str:
        """The settings as text."""
        return json.dumps(self._asdict(), separators=(",", ":"))


def from_variable() -> Settings:
    """The settings that this process was started with, which commands do not inherit."""
    found: Any = os.environ.pop(VARIABLE)
    return Settings.of(found)
