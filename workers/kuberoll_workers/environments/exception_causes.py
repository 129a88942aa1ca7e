"""The cause of an exception that an environment's code has raised: its own fault, or that of what it depends on.

What an environment calls (a judge, a registry, a disk) fails by exceptions of the system and of libraries that reach
services. Their classes are read, the links that Python keeps between exceptions, and where they were raised; never
their texts.
"""

from __future__ import annotations

import dis
import errno
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Final

from kuberoll_workers.data.causes import NO_EVIDENCE, Cause, Evidence, error_name
from kuberoll_workers.data.tracebacks import Traceback
from kuberoll_workers.environments.interface import Unavailable

_EXHAUSTED: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO})
_UNREACHABLE: Final = frozenset(
    {
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.EHOSTDOWN),
        *(errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ETIMEDOUT, errno.ESTALE),
    }
)
_LIBRARIES: Final = frozenset(
    {
        *("aiohttp", "anthropic", "botocore", "grpc", "http", "httpcore", "httpx", "huggingface_hub", "openai"),
        *("requests", "urllib", "urllib3", "websockets"),
    }
)
"""Libraries that reach services. Their exceptions of these endings, and those derived from them, say that a service
was out of reach."""
_ENDINGS: Final = (
    *("Timeout", "TimeoutError", "TimeoutException", "ConnectError", "ConnectionError", "DisconnectedError"),
    *("ReadError", "WriteError", "RemoteDisconnected", "RemoteProtocolError", "IncompleteRead", "PayloadError"),
    *("ConnectionClosedError", "ChunkedEncodingError", "ProxyError", "MaxRetryError", "RetryError", "SSLError"),
)
_GARBLED: Final = frozenset({"BadHttpMessage", "BadStatusLine"})
"""What a service sent was no HTTP; aiohttp gives that a status of its own."""
_OUTAGES_OF_GRPC: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"})
_SOCKETS: Final = frozenset({"socket", "ssl"})
_STARTERS: Final = frozenset({"subprocess", "multiprocessing"})
_FULL: Final = ("SQLITE_FULL", "SQLITE_IOERR")
_MOST_LINKS: Final = 32
_MOST_FRAMES: Final = 1000
_RAISE: Final = dis.opmap["RAISE_VARARGS"]
_FILE: Final = re.compile(r'^ *File "([^"]+)"', re.MULTILINE)
_OF_LIBRARY: Final = re.compile(rf"/(?:{'|'.join(sorted(_LIBRARIES))})/[^\"]*\.pyx?$")
_OF_SOCKETS: Final = re.compile(r"/python[^/]*/(?:socket|ssl)\.py$")


def cause_of(error: BaseException) -> Cause:
    """The cause of an exception, from itself and from what it was raised from.

    An exception that was raised while another one was handled has that as its context only if a library raised it, or
    a `raise` in the handler itself, with or without `from`: code that fails in handling an error fails by itself.
    """
    try:
        return _found(error)
    except Exception:
        # Attributes of a foreign class may raise anything.
        return Cause("EnvironmentRaised")


def _found(error: BaseException) -> Cause:
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
        elif link.__context__ is not None and (_is_of_library(link) or _is_of_handler(link, link.__context__)):
            # Also where it is hidden from tracebacks, by `from None`, or as httpcore does.
            waiting.append(link.__context__)


def cause_of_wait(stack: Traceback | None) -> Cause:
    """The cause of a call that has exceeded its time limit.

    It is a service's doing if the call waits in a library that reaches services: one that does not answer leaves
    an environment that sets no limit of its own waiting.

    Args:
        stack: The calls that it is in; None: unknown.
    """
    files = [] if stack is None else _FILE.findall(stack.text)
    while files and _OF_SOCKETS.search(files[-1]):
        files.pop()
    return Cause("DependencyUnavailable" if files and _OF_LIBRARY.search(files[-1]) else "EnvironmentSilent")


def _is_of_handler(error: BaseException, handled: BaseException) -> bool:
    """True if a `raise` statement of the function that handled an exception has raised the error."""
    passed, caught = list(_frames(error)), handled.__traceback__
    if not passed or caught is None:
        return False
    last = passed[-1]
    if last.tb_frame is not caught.tb_frame or last.tb_lasti < 0:
        return False
    return last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


def _cause(error: BaseException) -> Cause | None:
    if isinstance(error, Unavailable):
        return Cause(error.reason, error.evidence)
    names = _names_in_libraries(error)
    if not _GARBLED.isdisjoint(names):
        return Cause("DependencyUnavailable")
    if (status := _status(error)) is not None:
        # Other answers refuse what was asked for, which is the environment's doing.
        return Cause("DependencyUnavailable", Evidence(http_status=status)) if _is_outage(status) else None
    if isinstance(error, OSError) and (found := _cause_of_system(error)) is not None:
        return found
    if any(name.endswith(_ENDINGS) for name in names) or _code_of_grpc(error, names) in _OUTAGES_OF_GRPC:
        return Cause("DependencyUnavailable")
    name = getattr(error, "sqlite_errorname", None)
    if type(error).__module__ == "sqlite3" and type(name) is str and name.startswith(_FULL):
        return Cause("ResourceExhausted", Evidence(error=name))
    return None


def _cause_of_system(error: OSError) -> Cause | None:
    if isinstance(error, socket.gaierror):
        return Cause("DependencyUnavailable", Evidence(error=_name_of_lookup(error)))
    if isinstance(error, ssl.SSLError):
        # Its number is OpenSSL's. aiohttp's, which are of this class, too, have no reason.
        reason = getattr(error, "reason", None)
        return Cause("DependencyUnavailable", Evidence(error=reason if type(reason) is str else None))
    if error.errno in _EXHAUSTED:
        return Cause("ResourceExhausted", Evidence(error=error_name(error.errno)))
    if error.errno == errno.EAGAIN and _passed(error, _STARTERS):
        # Elsewhere it says that a lock is taken, or that there is nothing to read yet.
        return Cause("ResourceExhausted", Evidence(error="EAGAIN"))
    if error.errno in _UNREACHABLE:
        return Cause("DependencyUnavailable", Evidence(error=error_name(error.errno)))
    if isinstance(error, ConnectionError) and not isinstance(error, BrokenPipeError):
        # As asyncio raises it, without a number. A pipe may be one to a program of the environment's own.
        return Cause("DependencyUnavailable")
    if isinstance(error, TimeoutError) and any(
        _passed(one, _LIBRARIES | _SOCKETS) for one in (error, error.__cause__, error.__context__) if one is not None
    ):
        # Whoever set the limit, a library waited for a service: it, or the wait that was cancelled, was in there.
        return Cause("DependencyUnavailable")
    return None


def _is_outage(status: int) -> bool:
    return status in (408, 429) or 500 <= status < 600


def _status(error: BaseException) -> int | None:
    """The status of an answer over HTTP that a library's exception carries; None: it is none."""
    if not _is_of_library(error):
        return None
    response: Any = getattr(error, "response", None)
    if isinstance(response, Mapping):
        # As botocore has it.
        metadata = response.get("ResponseMetadata")
        found = metadata.get("HTTPStatusCode") if isinstance(metadata, Mapping) else None
        return found if type(found) is int else None
    for owner, name in ((error, "status"), (error, "status_code"), (error, "code"), (response, "status_code")):
        found = getattr(owner, name, None)
        if type(found) is int and 100 <= found < 600:
            return found
    return None


def _code_of_grpc(error: BaseException, names: list[str]) -> str | None:
    if "RpcError" not in names:
        return None
    try:
        return str(error.code().name)  # type: ignore[attr-defined]
    except Exception:
        return None


def _is_of_library(error: BaseException) -> bool:
    return bool(_names_in_libraries(error))


def _names_in_libraries(error: BaseException) -> list[str]:
    """Names of the exception's class, and of those that it is derived from, as far as they are of libraries."""
    return [one.__name__ for one in type(error).__mro__ if _top(one.__module__) in _LIBRARIES]


def _passed(error: BaseException, modules: frozenset[str]) -> bool:
    """True if an exception was raised in calls of these modules."""
    return any(_top(frame.tb_frame.f_globals.get("__name__")) in modules for frame in _frames(error))


def _frames(error: BaseException) -> Iterator[TracebackType]:
    here, seen = error.__traceback__, 0
    while here is not None and seen < _MOST_FRAMES:
        yield here
        here, seen = here.tb_next, seen + 1


def _top(module: object) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def _name_of_lookup(error: socket.gaierror) -> str | None:
    names = {getattr(socket, name): name for name in dir(socket) if name.startswith("EAI_")}
    return names.get(error.errno or 0)
