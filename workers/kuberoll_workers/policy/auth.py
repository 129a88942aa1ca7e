"""Tokens of a policy, one for each scope, and the authorization of requests."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Mapping, MutableMapping
from typing import Final

import msgspec

from kuberoll_api.contract import SCOPES, Scope, token_variable

# Tokens for sampling and for publishing also open the read scope; no token opens both of the others.
_ACCEPTED_SCOPES: Final[Mapping[Scope, frozenset[Scope]]] = {
    "generate": frozenset({"generate"}),
    "weights": frozenset({"weights"}),
    "read": frozenset(SCOPES),
}
_SCHEME: Final = "bearer"
# What a header can carry, and nobody guesses; tokens from Secrets of users may be anything.
_USABLE: Final = re.compile(r"[!-~]{16,}")


class Tokens(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The token of each scope, and those of others.

    Attributes:
        further: Further tokens by the variable that they come from, whose name begins with that of their scope: those
            of environments' server pods and of pods outside the job. One with two scopes is there twice.
    """

    generate: str
    weights: str
    read: str
    further: dict[str, str] = {}

    def for_scope(self, scope: Scope) -> str:
        """The token of one scope."""
        return str(getattr(self, scope))

    def variables(self) -> dict[str, str]:
        """Environment variables from which `take_tokens` reads them."""
        return {**{token_variable(scope): self.for_scope(scope) for scope in SCOPES}, **self.further}

    def known(self) -> list[tuple[Scope, str]]:
        """All tokens, each with its scope."""
        found: list[tuple[Scope, str]] = [(scope, self.for_scope(scope)) for scope in SCOPES]
        return [*found, *((scope, token) for name, token in self.further.items() if (scope := _scope_of(name)))]


class AccessDenied(Exception):
    """A request that is not authorized.

    Attributes:
        status: HTTP status: 401 without a valid token, 403 with a token of another scope.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def authorize(authorization: str | None, tokens: Tokens | None, scope: Scope) -> None:
    """Check that a request may use a scope, in time that does not depend on the tokens.

    Args:
        authorization: Its Authorization header.
        tokens: The valid tokens; None: every request is allowed.

    Raises:
        AccessDenied: It may not.
    """
    if tokens is None:
        return
    scheme, _, text = (authorization or "").partition(" ")
    shown = text.strip().encode()
    # Compare with every token, even after a match.
    matches = [known for known, token in tokens.known() if hmac.compare_digest(shown, token.encode())]
    if not matches or scheme.lower() != _SCHEME:
        raise AccessDenied(401, "the Authorization header must be: Bearer and one of the job's tokens")
    if _ACCEPTED_SCOPES[scope].isdisjoint(matches):
        given = " and ".join(dict.fromkeys(matches))
        raise AccessDenied(403, f"this needs the job's token of scope {scope}; the given one is of scope {given}")


def require_token(authorization: str | None, tokens: Collection[str]) -> None:
    """Check that a request has one of some tokens, in time that does not depend on them.

    Args:
        authorization: Its Authorization header.

    Raises:
        AccessDenied: It has none of them.
    """
    scheme, _, text = (authorization or "").partition(" ")
    shown = text.strip().encode()
    # Compare with every token, even after a match.
    matches = [hmac.compare_digest(shown, token.encode()) for token in tokens]
    if not any(matches) or scheme.lower() != _SCHEME:
        raise AccessDenied(401, "the Authorization header must be: Bearer and a token of the scope read")


def take_further_tokens(environment: MutableMapping[str, str], scope: Scope) -> list[str]:
    """Remove further tokens of one scope from environment variables and return them.

    Raises:
        ValueError: One can be guessed or not be sent; the message names its variable.
    """
    names = [name for name in sorted(environment) if name.startswith(f"{token_variable(scope)}_")]
    return list(_usable({name: environment.pop(name).strip() for name in names}).values())


def take_token(environment: MutableMapping[str, str], scope: Scope) -> str | None:
    """Remove the token of one scope from environment variables and return it; None if it is not set."""
    return environment.pop(token_variable(scope), None) or None


def take_tokens(environment: MutableMapping[str, str]) -> Tokens | None:
    """Remove all tokens from environment variables and return them; None if none is set.

    Raises:
        ValueError: Only some are set, or a further one can be guessed or not be sent; the message names the variables.
    """
    # A token from a file often ends with a line break.
    further = {name: environment.pop(name).strip() for name in sorted(environment) if _scope_of(name)}
    found: dict[str, str | None] = {scope: take_token(environment, scope) for scope in SCOPES}
    missing = [token_variable(scope) for scope in SCOPES if found[scope] is None]
    if len(missing) == len(SCOPES):
        return None
    if missing:
        raise ValueError(f"{', '.join(missing)}: not set, though other tokens are; set all of them or none")
    return msgspec.convert({**found, "further": _usable(further)}, Tokens)


def _usable(tokens: dict[str, str]) -> dict[str, str]:
    unusable = [name for name, token in tokens.items() if not _USABLE.fullmatch(token)]
    if unusable:
        raise ValueError(
            f"{', '.join(unusable)}: a token has at least 16 visible ASCII characters, such as 64 random hex"
        )
    return tokens


def _scope_of(name: str) -> Scope | None:
    """Scope of the further token in a variable; None if it is the variable of something else."""
    return next((scope for scope in SCOPES if name.startswith(f"{token_variable(scope)}_")), None)
