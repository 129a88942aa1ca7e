"""The tokens of a policy, one for each scope, and who may ask for what."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, MutableMapping
from typing import Final

import msgspec

from kuberoll_api.contract import SCOPES, Scope, token_variable

# Whoever may sample or publish may look, too; nobody may do both with one token.
_ACCEPTED_SCOPES: Final[Mapping[Scope, frozenset[Scope]]] = {
    "generate": frozenset({"generate"}),
    "weights": frozenset({"weights"}),
    "read": frozenset(SCOPES),
}
_SCHEME: Final = "bearer"


class Tokens(msgspec.Struct, kw_only=True, frozen=True):
    """The token of each scope."""

    generate: str
    weights: str
    read: str

    def for_scope(self, scope: Scope) -> str:
        """The token of one scope."""
        return str(getattr(self, scope))

    def variables(self) -> dict[str, str]:
        """Environment variables for a program that takes them by `take_tokens`."""
        return {token_variable(scope): self.for_scope(scope) for scope in SCOPES}


class AccessDenied(Exception):
    """A request that its token does not open.

    Attributes:
        status: 401 where no known token was shown, 403 where one of another scope was.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def authorize(authorization: str | None, tokens: Tokens | None, scope: Scope) -> None:
    """Let a request of a scope pass; how long the decision takes says nothing of the tokens.

    Args:
        authorization: Its Authorization header.
        tokens: Those that are known; None: everybody may do everything.

    Raises:
        AccessDenied: It may not pass.
    """
    if tokens is None:
        return
    scheme, _, text = (authorization or "").partition(" ")
    shown = text.strip().encode()
    # With every token, whether one has matched already or not.
    matches = [known for known in SCOPES if hmac.compare_digest(shown, tokens.for_scope(known).encode())]
    if not matches or scheme.lower() != _SCHEME:
        raise AccessDenied(401, "the Authorization header must be: Bearer and one of the job's tokens")
    if _ACCEPTED_SCOPES[scope].isdisjoint(matches):
        raise AccessDenied(403, f"this needs the job's token of scope {scope}; the one shown is of scope {matches[0]}")


def take_token(environment: MutableMapping[str, str], scope: Scope) -> str | None:
    """The token of one scope out of environment variables, where it is not left; None: there is none."""
    return environment.pop(token_variable(scope), None) or None


def take_tokens(environment: MutableMapping[str, str]) -> Tokens | None:
    """All tokens out of environment variables, where they are not left; None: there is none of them.

    Raises:
        ValueError: Some are there and others are not; names the missing variables.
    """
    found = {scope: take_token(environment, scope) for scope in SCOPES}
    missing = [token_variable(scope) for scope, token in found.items() if token is None]
    if len(missing) == len(SCOPES):
        return None
    if missing:
        raise ValueError(f"{', '.join(missing)}: not set, though other tokens are; set all of them or none")
    return msgspec.convert(found, Tokens)
