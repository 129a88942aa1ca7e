"""Fatal errors of commands: message and exit code."""

from __future__ import annotations

import re
from typing import Final

from kuberoll_operator.kube.errors import ApiError, Forbidden

RIGHTS_PAGE: Final = "docs/how-to/reading-output.md#rights"

_DENIED = re.compile(
    r'User "(?P<user>[^"]+)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)")?'
)


class ConsoleError(Exception):
    """Fatal error of a command, with a message for the user.

    Attributes:
        code: Exit code: 1 if the command failed, 2 if it was rejected before anything was done.
    """

    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def describe_error(error: ApiError) -> str:
    """An API server's error as a sentence; a missing permission is named as in a Role."""
    if isinstance(error, Forbidden) and (denied := _DENIED.search(error.message)) is not None:
        group = f".{denied['group']}" if denied["group"] else ""
        where = f" in namespace {denied['namespace']}" if denied["namespace"] else " in all namespaces"
        return (
            f"missing permission: {denied['user']} may not {denied['verb']} {denied['resource']}{group}{where}; "
            f"{RIGHTS_PAGE} lists what the commands need"
        )
    if error.code == 401:
        return f"the API server does not know you ({error.message}): log in to the cluster again"
    return f"the API server answered: {error}"
