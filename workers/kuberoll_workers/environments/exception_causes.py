"""The cause of an exception that an environment's code has raised: its own fault, or that of what it depends on.

What an environment calls (a judge, a registry, a disk) fails by exceptions of the system and of libraries for HTTP.
Their classes are read, and the links that Python keeps between exceptions, never their texts.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Final

from kuberoll_workers.data.causes import NO_EVIDENCE, Cause, Evidence, error_name
from kuberoll_workers.environments.interface import Unavailable

_EXHAUSTED: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EAGAIN}
)
_UNREACHABLE: Final = frozenset(
    {
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.EHOSTDOWN),
        *(errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ETIMEDOUT, errno.ESTALE),
    }
)
_LIBRARIES: Final = frozenset(
    {"aiohttp", "anthropic", "grpc", "http", "httpcore", "httpx", "openai", "requests", "urllib", "urllib3"}
)
"""Libraries that reach services. Their exceptions of these endings say that a service was out of reach."""
_ENDINGS: Final = (
    *("Timeout", "TimeoutError", "TimeoutException", "ConnectError", "ConnectionError", "DisconnectedError"),
    *("ReadError", "RemoteDisconnected", "RemoteProtocolError", "IncompleteRead", "PayloadError"),
)
_MOST_LINKS: Final = 32


def cause_of(error: BaseException) -> Cause:
    """The cause of an exception, from itself and from what it was raised from.

    An exception that was raised while another one was handled has that as its context only if a library for HTTP
    raised it: code that fails in handling an error fails by itself.
    """
    found: Cause | None = None
    for link in _links(error):
        if (here := _cause(link)) is None:
            continue
        if found is None or isinstance(link, Unavailable):
            # What was raised first knows best; an exception around it may have evidence of its own.
            found = Cause(here.reason, here.evidence or (NO_EVIDENCE if found is None else found.evidence))
        elif not found.evidence:
            found = Cause(found.reason, here.evidence)
    return found or Cause("EnvironmentRaised")


def _links(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], 0
    while waiting and seen < _MOST_LINKS:
        link = waiting.pop(0)
        seen += 1
        yield link
        if isinstance(link, BaseExceptionGroup):
            # The first one has ended the group.
            waiting += link.exceptions[:1]
        if link.__cause__ is not None:
            waiting.append(link.__cause__)
        elif link.__context__ is not None and _is_of_library(link):
            # Also where the library hides it from tracebacks, as httpcore does.
            waiting.append(link.__context__)


def _cause(error: BaseException) -> Cause | None:
    if isinstance(error, Unavailable):
        return Cause(error.reason, error.evidence)
    if (status := _status(error)) is not None:
        # Other answers refuse what was asked for, which is the environment's doing.
        return Cause("DependencyUnavailable", Evidence(http_status=status)) if _is_outage(status) else None
    if isinstance(error, socket.gaierror):
        return Cause("DependencyUnavailable", Evidence(error=_name_of_lookup(error)))
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        return Cause("ResourceExhausted", Evidence(error=error_name(error.errno)))
    if isinstance(error, OSError) and error.errno in _UNREACHABLE:
        return Cause("DependencyUnavailable", Evidence(error=error_name(error.errno)))
    if _is_of_library(error) and type(error).__name__.endswith(_ENDINGS):
        return Cause("DependencyUnavailable")
    return None


def _is_outage(status: int) -> bool:
    return status in (408, 429) or 500 <= status < 600


def _status(error: BaseException) -> int | None:
    """The status of an answer over HTTP that a library's exception carries; None: it is none."""
    if not _is_of_library(error):
        return None
    response = getattr(error, "response", None)
    for owner, name in ((error, "status"), (error, "status_code"), (error, "code"), (response, "status_code")):
        found = getattr(owner, name, None)
        if type(found) is int and 100 <= found < 600:
            return found
    return None


def _is_of_library(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _LIBRARIES


def _name_of_lookup(error: socket.gaierror) -> str | None:
    names = {getattr(socket, name): name for name in dir(socket) if name.startswith("EAI_")}
    return names.get(error.errno or 0)
