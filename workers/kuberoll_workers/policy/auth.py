"""Who may ask the policy."""

from __future__ import annotations

import hmac

_SCHEME = "bearer"


def admitted(authorization: str | None, token: str | None) -> bool:
    """Whether a request may be answered; how long the answer takes says nothing of the token.

    Args:
        authorization: Its Authorization header.
        token: What it must show; None: nothing.
    """
    if token is None:
        return True
    scheme, _, shown = (authorization or "").partition(" ")
    same = hmac.compare_digest(shown.strip().encode(), token.encode())
    return same and scheme.lower() == _SCHEME
