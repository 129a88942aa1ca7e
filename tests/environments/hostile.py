"""An environment whose bad rows fork, write to every descriptor, and die; each row's right outcome is known."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import random
import signal
import struct
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kuberoll_workers.environments.interface import EnvironmentReturn

TURNS = 3


def observed(row: int, turn: int) -> str:
    """The observation of a row's turn."""
    return f"row {row}, turn {turn}"


def reward(row: int, turn: int) -> float:
    """The reward of a row's turn."""
    return row + turn / 16


def _descriptors(*, everything: bool) -> list[int]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if int(link.name) > 2 and (everything or str(link.readlink()).startswith("socket:")):
                found.append(int(link.name))
    return found


def _write(data: bytes, *, everything: bool = False) -> None:
    for number in _descriptors(everything=everything):
        with contextlib.suppress(OSError):
            os.write(number, data)


def _frames(chance: random.Random) -> bytes:
    """Something like one or two frames, or a part of one; the ids are guesses."""
    body = chance.randbytes(chance.randrange(40))
    one = struct.pack(
        ">II16s", len(body), zlib.crc32(body), chance.randbytes(16) if chance.random() < 0.7 else bytes(16)
    )
    whole = (one + body) * chance.randrange(1, 3)
    return whole[: chance.randrange(1, len(whole) + 1)] if chance.random() < 0.3 else whole


def _garbage(chance: random.Random) -> bytes:
    return chance.choice([b"\xff" * 64, b"\0", b"\0" * 24, chance.randbytes(chance.randrange(1, 200)), _frames(chance)])


def _libc() -> Any:
    return ctypes.CDLL(None)


def _pause(chance: random.Random) -> float:
    return chance.choice([0.0, 0.0, 0.002, 0.02, 0.1])


def fork(chance: random.Random) -> None:
    """Both come back, the copy perhaps later."""
    wait = _pause(chance)
    if os.fork() == 0:
        time.sleep(wait)


def fork_without_python(chance: random.Random) -> None:
    """Both come back, and Python does not know of it."""
    wait = _pause(chance)
    if _libc().fork() == 0:
        time.sleep(wait)


def fork_and_raise(chance: random.Random) -> None:
    """The copy fails to become another program."""
    if os.fork() == 0:
        os.execv("/nowhere/program", ["program"])


def fork_terminal(chance: random.Random) -> None:
    """The same at a terminal of its own."""
    pid, _ = pty.fork()
    if pid == 0:
        os.execvp("no-such-program", ["program"])


def daemon(chance: random.Random) -> None:
    """A copy of a copy comes back later, in a session of its own."""
    wait = _pause(chance)
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(wait)


def copy_writes(chance: random.Random) -> None:
    """A copy that Python does not know of writes to all that it has."""
    data, wait = _garbage(chance), _pause(chance)
    if _libc().fork() == 0:
        time.sleep(wait)
        _write(data, everything=True)
        os._exit(0)


def copy_reads(chance: random.Random) -> None:
    """A copy takes what is sent to the process."""
    if _libc().fork() == 0:
        for number in _descriptors(everything=False):
            with contextlib.suppress(OSError):
                os.read(number, 100)
        os._exit(0)


def write(chance: random.Random) -> None:
    """It writes to its own sockets."""
    _write(_garbage(chance))


def thread_writes(chance: random.Random) -> None:
    """A thread writes to everything, now and then, also when the step has returned."""
    parts = [(_pause(chance), _garbage(chance)) for _ in range(chance.randrange(1, 4))]

    def go() -> None:
        for wait, data in parts:
            time.sleep(wait)
            _write(data, everything=True)

    threading.Thread(target=go, daemon=True).start()


def die(chance: random.Random) -> None:
    os.kill(os.getpid(), chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGSTOP]))


def die_later(chance: random.Random) -> None:
    number = chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
    timer = threading.Timer(_pause(chance), os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def copy_kills(chance: random.Random) -> None:
    """A copy kills the process that it is of."""
    wait, parent = _pause(chance), os.getpid()
    if os.fork() == 0:
        time.sleep(wait)
        os.kill(parent, signal.SIGKILL)
        os._exit(0)


def exit_now(chance: random.Random) -> None:
    os._exit(chance.randrange(2))


def become_another(chance: random.Random) -> None:
    os.execv("/bin/true", ["true"])


def close_everything(chance: random.Random) -> None:
    os.closerange(3, 1024)


ACTS: dict[str, Callable[[random.Random], None]] = {
    act.__name__: act
    for act in (
        fork,
        fork_without_python,
        fork_and_raise,
        fork_terminal,
        daemon,
        copy_writes,
        copy_reads,
        write,
        thread_writes,
        die,
        die_later,
        copy_kills,
        exit_now,
        become_another,
        close_everything,
    )
}


class Hostile:
    """A row has `TURNS` turns; one with an `act` does it in its turn `when`, each time that it comes there."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._chance = random.Random(config.get("seed"))

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        turns = [state.get("turn", 0) for state in metadata]
        for state, turn in zip(metadata, turns, strict=True):
            if "act" in state and state["when"] == turn:
                ACTS[state["act"]](self._chance)
        rows = [(state["row"], turn) for state, turn in zip(metadata, turns, strict=True)]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": observed(*one)} for one in rows],
            metadata=[{**state, "turn": turn + 1} for state, turn in zip(metadata, turns, strict=True)],
            next_stop_strings=None,
            rewards=[reward(*one) for one in rows],
            terminateds=[turn + 1 >= TURNS for turn in turns],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}
