"""What a command cannot go on from, in a sentence, and with which exit code it ends."""

from __future__ import annotations

import re
from typing import Final

from kuberoll_operator.kube.errors import ApiError, Forbidden

RIGHTS_PAGE: Final = "docs/reading-output.md#rights"

_DENIED = re.compile(
    r'User "(?P<user>[^"]+)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)")?'
)


class ConsoleError(Exception):
    """The end of a command; the message is for the person.

    Attributes:
        code: Exit code: 1, it did not come about; 2, it was refused before anything was done.
    """

    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def sentence_of(error: ApiError) -> str:
    """An API server's refusal in words: a right that is missing is named as a Role would have it."""
    if isinstance(error, Forbidden) and (denied := _DENIED.search(error.message)) is not None:
        group = f".{denied['group']}" if denied["group"] else ""
        where = f" in namespace {denied['namespace']}" if denied["namespace"] else " in all namespaces"
        return (
            f"missing right: {denied['user']} may not {denied['verb']} {denied['resource']}{group}{where}; "
            f"{RIGHTS_PAGE} lists what the commands need"
        )
    if error.code == 401:
        return f"the API server does not know you ({error.message}): log in to the cluster again"
    return f"the API server answered: {error}"
