"""Names and passwords for registries, as `docker login` keeps them.

Only what is in the file itself is read: programs that it names (`credHelpers`, `credsStore`) are not started.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kuberoll_workers.sandboxes.images.references import DOCKER_HUB

_HUB_KEY = "https://index.docker.io/v1/"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a registry is asked with.

    Attributes:
        basic: Name and password in base64, as HTTP's Basic has them; None: there are none.
        missing: What to tell if a registry wants some.
    """

    basic: str | None
    missing: str = ""

    def __repr__(self) -> str:
        return f"Credentials({'…' if self.basic else None}, {self.missing!r})"


def file_of(environment: Mapping[str, str]) -> Path:
    """Where `docker login` keeps them."""
    folder = environment.get("DOCKER_CONFIG")
    return (Path(folder) if folder else Path.home() / ".docker") / "config.json"


def credentials_for(host: str) -> Credentials:
    """What there is for a registry."""
    path = file_of(os.environ)
    try:
        text = path.read_text()
    except OSError:
        text = "{}"
    return read(text, str(path), host)


def read(text: str, where: str, host: str) -> Credentials:
    """What a file's content has for a registry.

    Args:
        where: Name of the file, for what to tell.
    """
    login = f"`docker login {host}` writes them to {where}"
    try:
        value = json.loads(text)
    except ValueError as error:
        return Credentials(None, f"{where} is not JSON ({error}): {login}")
    keys: tuple[str, ...] = (host, f"https://{host}", f"http://{host}", f"https://{host}/v1/", f"https://{host}/v2/")
    if host == DOCKER_HUB:
        keys = (_HUB_KEY, "index.docker.io", f"registry-1.{DOCKER_HUB}", *keys)
    auths = _table(value, "auths")
    for key in keys:
        if isinstance(entry := auths.get(key), dict) and (entry.get("auth") or entry.get("username")):
            return _basic(entry, f"{where}: auths[{key!r}]", login)
    helper = _table(value, "credHelpers").get(host) or (value.get("credsStore") if isinstance(value, dict) else None)
    if helper:
        return Credentials(
            None,
            f"{where} keeps credentials in the program docker-credential-{helper}, which is not started here: take "
            f"`credHelpers` and `credsStore` out of a copy of the file, name its directory in DOCKER_CONFIG, and "
            f"`docker login {host}` writes them there",
        )
    return Credentials(None, f"there are no credentials for {host}: {login}")


def _basic(entry: dict[str, Any], where: str, login: str) -> Credentials:
    if entry.get("identitytoken"):
        return Credentials(None, f"{where} has an identity token, which is not read here: use a name and a password")
    try:
        plain = (
            base64.b64decode(entry["auth"], validate=True).decode()
            if entry.get("auth")
            else f"{entry['username']}:{entry['password']}"
        )
    except (binascii.Error, ValueError, KeyError, TypeError):
        plain = ""
    if not plain.strip("\0").partition(":")[2]:
        return Credentials(None, f"{where} is no name and password in base64: {login}")
    return Credentials(base64.b64encode(plain.strip("\0").encode()).decode())


def _table(value: Any, name: str) -> dict[str, Any]:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}
