"""Engines that `kuberoll serve` keeps on this machine, by the names of their jobs.

Each has a file that only this user can read, with its URL and tokens. Its process holds a lock on the file, so the file
of one that was killed is recognized.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kuberoll_api.contract import ServeArgs
from kuberoll_workers.data.places import state_directory
from kuberoll_workers.policy.auth import Tokens

POLL_SECONDS = 0.25

_FILE = "{name}.json"
# Fields of the manifest from which the arguments of a Serve application are made. Those that are not listed change
# while an engine serves, or say nothing about what it generates.
_FIELDS = {
    "autoscaling": "autoscaling",
    "engine": "engine",
    "engine_args": "engineArgs",
    "gpus": "gpusPerReplica",
    "max_ongoing_requests": "maxOngoingRequests",
    "model": "model.source",
    "replicas": "replicas",
    "revision": "model.revision",
    "simulated": "simulated",
    "tokenizer": "model.tokenizer",
}


class ServedEngine(msgspec.Struct, kw_only=True):
    """An engine that is serving.

    Attributes:
        name: Name of its job.
        pid: Of `kuberoll serve`.
        args: Arguments of its Serve application, as plain JSON.
        log: Path of its log.
    """

    name: str
    url: str
    pid: int
    tokens: Tokens
    args: dict[str, Any]
    log: str


class EngineExists(Exception):
    """An engine of this name is serving already."""


def engines_directory() -> Path:
    """Directory of the files: `serve` in KubeRoll's directory of state."""
    return state_directory() / "serve"


@contextmanager
def claim(name: str) -> Iterator[Path]:
    """Claim the name for an engine of this process; the file is removed at the end.

    Yields:
        The path of its file, which is empty until `publish` is called.

    Raises:
        EngineExists: Another process serves an engine of this name.
    """
    directory = engines_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / _FILE.format(name=name)
    try:
        descriptor = _locked(path)
    except BlockingIOError as error:
        raise EngineExists(
            f"an engine for the job {name!r} is starting or serving already ({path}): end it first, or give this job "
            "another name"
        ) from error
    try:
        os.ftruncate(descriptor, 0)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _locked(path: Path) -> int:
    """Open a file, which is created if it is missing, and lock it.

    Raises:
        BlockingIOError: Another process has locked it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have removed the file after it was opened here.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def publish(path: Path, engine: ServedEngine) -> None:
    """Write a claimed file, so that `kuberoll run` finds the engine."""
    # In place: a file that replaced this one would not be locked.
    path.write_bytes(msgspec.json.format(msgspec.json.encode(engine)) + b"\n")


def withdraw(path: Path) -> None:
    """Empty a claimed file: the engine is ending, and runs that use it end too."""
    os.truncate(path, 0)


async def ended(engine: ServedEngine) -> None:
    """Wait until an engine has been withdrawn, or its process has ended."""
    while True:
        if find(engine.name) != engine:
            return
        await asyncio.sleep(POLL_SECONDS)


def find(name: str) -> ServedEngine | None:
    """The engine that serves for the job of this name; None: there is none."""
    return _read(engines_directory() / _FILE.format(name=name))


def is_claimed(name: str) -> bool:
    """True if a process serves an engine for the job of this name, starts one, or ends one."""
    path = engines_directory() / _FILE.format(name=name)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def find_by_url(url: str) -> ServedEngine | None:
    """The engine that serves at this URL; None: none of this user's does."""
    engines = (_read(path) for path in sorted(engines_directory().glob(_FILE.format(name="*"))))
    wanted = url.rstrip("/").removesuffix("/v1")
    return next((engine for engine in engines if engine is not None and engine.url == wanted), None)


def _read(path: Path) -> ServedEngine | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        # An engine that is still starting has not written it yet.
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(path.read_bytes(), type=ServedEngine)
    finally:
        os.close(descriptor)
    return None


def differences(engine: ServedEngine, args: ServeArgs) -> list[str]:
    """Differences of an engine from the one that a job describes, one line each."""
    wanted = msgspec.to_builtins(args)
    lines = []
    for name, field in _FIELDS.items():
        before, after = engine.args.get(name), wanted.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            changed = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
            lines += [_line(f"{field}.{key}", before.get(key), after.get(key)) for key in changed]
        elif before != after:
            lines.append(_line(field, before, after))
    return lines


def _line(field: str, before: Any, after: Any) -> str:
    there, here = ("not set" if value is None else json.dumps(value) for value in (before, after))
    return f"spec.generation.{field}: there {there}, here {here}"
