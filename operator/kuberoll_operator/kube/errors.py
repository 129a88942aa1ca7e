"""Errors of requests to the API server: one class for each reaction that is right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MESSAGE_CHARACTERS = 1000
_MANAGER = re.compile(r'conflicts? with "([^"]+)"')


class ApiError(Exception):
    """A request that failed.

    Attributes:
        code: HTTP status; 0 if there was no answer.
        reason: Kubernetes' reason, e.g. Forbidden or AlreadyExists; may be empty.
        message: The API server's message, at most 1,000 characters.
        request: Verb and path, for the log.
    """

    def __init__(self, message: str, *, code: int = 0, reason: str = "", request: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message[:MESSAGE_CHARACTERS]
        self.request = request

    def __str__(self) -> str:
        status = " ".join(filter(None, (str(self.code or ""), self.reason)))
        return ": ".join(filter(None, (self.request, status, self.message)))


class NotFound(ApiError):
    """404: the object does not exist, or its kind is not served."""


class Unauthorized(ApiError):
    """401, even with fresh credentials."""


class Forbidden(ApiError):
    """403: the role does not allow it; may be fixed while the operator runs."""


class QuotaExceeded(Forbidden):
    """403 of a ResourceQuota: space may become free."""


class Invalid(ApiError):
    """400, 405, 413, 415 and 422: the same request will never succeed."""


class Conflict(ApiError):
    """409: the object exists already, has another resource version or uid, or is being changed."""


class FieldConflict(Conflict):
    """409 of server-side apply: fields belong to other managers.

    Attributes:
        managers: Names of those field managers.
    """

    def __init__(self, message: str, *, managers: tuple[str, ...], code: int, reason: str, request: str) -> None:
        super().__init__(message, code=code, reason=reason, request=request)
        self.managers = managers


class Gone(ApiError):
    """410: the resource version or the continuation of a list is too old; list again."""


class TooMany(ApiError):
    """429: too many requests.

    Attributes:
        retry_after: Seconds that the server asks to wait; None if it does not.
    """

    retry_after: float | None = None


class Unavailable(ApiError):
    """5xx, a time-out or a lost connection: the request may or may not have been executed, and can be repeated."""


class NotLeader(Exception):
    """A write was withheld: another operator may hold the lease by now."""


def error_of(code: int, status: Mapping[str, Any], request: str, retry_after: str | None = None) -> ApiError:
    """The error that an answer means.

    Args:
        status: The answer's `Status` object; may be empty or anything else.
        retry_after: Value of the Retry-After header, if there is one.
    """
    message = str(status.get("message") or f"HTTP {code}")
    reason = str(status.get("reason") or "")
    given = status.get("details")
    details: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    match code:
        case 401:
            kind: type[ApiError] = Unauthorized
        case 403:
            kind = QuotaExceeded if "exceeded quota" in message else Forbidden
        case 404:
            kind = NotFound
        case 409:
            causes = [cause for cause in details.get("causes") or () if cause.get("reason") == "FieldManagerConflict"]
            if causes:
                found = (_MANAGER.search(str(cause.get("message"))) for cause in causes)
                managers = tuple(dict.fromkeys(match[1] for match in found if match))
                return FieldConflict(message, managers=managers, code=code, reason=reason, request=request)
            kind = Conflict
        case 410:
            kind = Gone
        case 429:
            error = TooMany(message, code=code, reason=reason, request=request)
            error.retry_after = _seconds(retry_after) or _seconds(details.get("retryAfterSeconds"))
            return error
        case _ if code == 408 or code >= 500:
            kind = Unavailable
        case _:
            kind = Invalid
    return kind(message, code=code, reason=reason, request=request)


def _seconds(value: Any) -> float | None:
    # The header may also hold a date, but no API server sends one.
    try:
        return max(0.0, float(value))
    except (TypeError, ValueError):
        return None
