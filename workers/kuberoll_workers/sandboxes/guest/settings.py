"""Settings of the server inside a sandbox, from the variable KUBEROLL_SANDBOX."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

VARIABLE: Final = "KUBEROLL_SANDBOX"
"""Variable that has them, as an object of JSON. Nothing in it is secret."""

IDENTITY_VARIABLE: Final = "KUBEROLL_SANDBOX_USER"
"""Variable that says whom commands run as, where whoever starts the server knows it."""


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
        of_the_image: True if this process was started as the image says, user apart: its working directory and its
            variables are then those of commands, as far as these settings say nothing.
        identity: File that says whom commands run as, if neither `user` nor `IDENTITY_VARIABLE` does.
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
    of_the_image: bool = False
    identity: str | None = None
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
    settings = Settings.of(found)
    return _completed(settings) if settings.of_the_image else settings


def write_identity(*paths: str) -> None:
    """Write whom this process runs as, for `Settings.identity`."""
    for path in paths:
        with open(path, "w", encoding="ascii") as file:
            file.write(f"{os.getuid()}:{os.getgid()}")


def _completed(settings: Settings) -> Settings:
    known = os.environ.pop(IDENTITY_VARIABLE, "")
    user = settings.user or known
    if not user and settings.identity is not None:
        with open(settings.identity, encoding="ascii") as file:
            user = file.read().strip()
    return settings._replace(
        user=user,
        workdir=os.path.normpath(os.path.join(os.getcwd(), settings.workdir)),
        environment={**_of_the_image(os.environ), **settings.environment},
    )


def _of_the_image(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables without those that the loader was started with, that Kubernetes adds, and that are root's own."""
    own = {"GLIBC_TUNABLES", "HOSTNAME", "LD_AUDIT", "LD_PRELOAD", "PWD"}
    return {
        name: text
        for name, text in variables.items()
        if name not in own and not name.startswith("KUBERNETES_") and (name, text) != ("HOME", "/root")
    }
