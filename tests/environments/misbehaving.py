"""An environment that does to a step whatever its episode's metadata says: all that the table of misbehaviors needs."""

from __future__ import annotations

import asyncio
import datetime
import enum
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from kuberoll_workers.environments.interface import EnvironmentReturn, UnusableRow

UNPICKLED = Path("/tmp/kuberoll-was-unpickled")

SLEEP = "3601.25"
"""Tells the sleeping processes of these tests from others."""


class TwoArguments(Exception):
    """Cannot be unpickled: its constructor wants another number of arguments than it hands on."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class EvilText(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt("no words")

    __repr__ = __str__


class Evil:
    """Its representation raises, or never comes."""

    def __init__(self, hangs: bool = False) -> None:
        self._hangs = hangs

    def __repr__(self) -> str:
        if self._hangs:
            time.sleep(3600)
        raise SystemExit("no representation")

    __str__ = __repr__


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


class Reducing:
    """A pickle of it would run a command."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {UNPICKLED}",)


class Color(enum.Enum):
    RED = "red"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def _self_reference() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["me"] = value
    return value


def _raise(error: BaseException) -> Any:
    raise error


def _tensor() -> Any:
    import torch

    return torch.tensor([1.0, 2.0])


def _end_by(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(3600)


def _end_group() -> None:
    os.killpg(0, signal.SIGKILL)
    time.sleep(3600)


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(3600)


def _break_json() -> None:
    vars(json).update(dumps=None, loads=None)


def _deafen() -> None:
    os.closerange(0, 4096)
    time.sleep(3600)


def _bomb() -> None:
    """Processes in sessions of their own, some of them orphans; none of them ever ends."""
    for _ in range(15):
        subprocess.Popen(["sleep", SLEEP], start_new_session=True)
        subprocess.Popen(["sh", "-c", f"setsid sleep {SLEEP} & exit"])
    time.sleep(3600)


METADATA: dict[str, Callable[[], Any]] = {
    "meta_bigint": lambda: {"n": 1 << 64},
    "meta_negative_bigint": lambda: {"n": -(1 << 70)},
    "meta_nan": lambda: {"history": [0, 1, {"score": float("nan")}]},
    "meta_inf": lambda: {"n": float("inf")},
    "meta_numpy_nan": lambda: {"n": numpy.array([1.0, numpy.nan])},
    "meta_set": lambda: {"n": {1, 2}},
    "meta_bytes": lambda: {"n": b"x"},
    "meta_intkey": lambda: {1: 2},
    "meta_surrogate": lambda: {"n": "\ud800"},
    "meta_surrogate_key": lambda: {"\udfff": 1},
    "meta_object": lambda: {"n": object()},
    "meta_function": lambda: {"n": print},
    "meta_self": _self_reference,
    "meta_deep": lambda: nested(300),
    "meta_very_deep": lambda: nested(100_000),
    "meta_huge": lambda: {"n": "x" * (17 << 20)},
    "meta_date": lambda: {"n": datetime.datetime(2026, 1, 1)},
    "meta_uuid": lambda: {"n": uuid.UUID(int=1)},
    "meta_enum": lambda: {"n": Color.RED},
    "meta_complex": lambda: {"n": 1j},
    "meta_reducing": lambda: {"n": Reducing()},
    "meta_evil_repr": lambda: {"n": Evil()},
    "meta_list": lambda: [1],
    "meta_generator": lambda: {"n": (number for number in range(3))},
}
"""Metadata that no record can hold."""

REWARDS: dict[str, Any] = {
    "big32": 1e39,
    "big64": 1e308,
    "bigint": 10**400,
    "nan": float("nan"),
    "inf": float("inf"),
    "minus_inf": float("-inf"),
    "none_reward": None,
    "text_reward": "1.0",
    "complex_reward": 1j,
    "object_reward": object(),
    "list_reward": [[1.0], [2.0]],
    "evil_reward": Evil(),
}
"""Rewards that are none."""

RAISED: dict[str, Callable[[], Any]] = {
    "raise": lambda: _raise(ValueError("as told")),
    "raise_surrogate": lambda: _raise(ValueError("\ud800")),
    "raise_long": lambda: _raise(ValueError("x" * 10_000_000)),
    "raise_escape": lambda: _raise(ValueError("\x1b]0;title\x07")),
    "exit": lambda: sys.exit(3),
    "exit_zero": lambda: sys.exit(0),
    "keyboard": lambda: _raise(KeyboardInterrupt()),
    "generator_exit": lambda: _raise(GeneratorExit()),
    "cancelled": lambda: _raise(asyncio.CancelledError()),
    "stop_iteration": lambda: next(iter(())),
    "stop_async_iteration": lambda: _raise(StopAsyncIteration()),
    "timeout_error": lambda: _raise(TimeoutError("the judge")),
    "base_exception": lambda: _raise(BaseException("bare")),
    "group": lambda: _raise(BaseExceptionGroup("several", [SystemExit(1), ValueError("x")])),
    "two_arguments": lambda: _raise(TwoArguments("a", "b")),
    "unpicklable": lambda: _raise(Unpicklable(threading.Lock())),
    "evil_text": lambda: _raise(EvilText()),
    "recursion": lambda: RAISED["recursion"](),
    "memory": lambda: _raise(MemoryError()),
}
"""What a step raises."""

RETURNED: dict[str, Callable[[EnvironmentReturn], Any]] = {
    "none": lambda made: None,
    "generator": lambda made: (item for item in made),
    "text": lambda made: "done",
    "dict": lambda made: made._asdict(),
    "short_tuple": lambda made: tuple(made)[:4],
    "evil": lambda made: Evil(),
    "coroutine_function": lambda made: _raise,
    "too_few_rewards": lambda made: made._replace(rewards=list(made.rewards)[:-1]),
    "too_many_flags": lambda made: made._replace(terminateds=[*made.terminateds, True]),
    "flag_none": lambda made: made._replace(terminateds=[None] * len(made.rewards)),
    "flag_two": lambda made: made._replace(terminateds=[2] * len(made.rewards)),
    "text_observations": lambda made: made._replace(observations="observed"),
    "no_content": lambda made: made._replace(observations=[{"role": "user"}] * len(made.rewards)),
    "bytes_content": lambda made: made._replace(observations=[{"role": "user", "content": b"x"}] * len(made.rewards)),
    "content_surrogate": lambda made: made._replace(
        observations=[{"role": "user", "content": "\ud800"}] * len(made.rewards)
    ),
    "role_surrogate": lambda made: made._replace(observations=[{"role": "\ud800", "content": "x"}] * len(made.rewards)),
    "role_number": lambda made: made._replace(observations=[{"role": 5, "content": "x"}] * len(made.rewards)),
    "huge_content": lambda made: made._replace(
        observations=[{"role": "user", "content": "x" * (2 << 20)}] * len(made.rewards)
    ),
    "stops_numbers": lambda made: made._replace(next_stop_strings=[[5]] * len(made.rewards)),
    "stops_surrogate": lambda made: made._replace(next_stop_strings=[["\ud800"]] * len(made.rewards)),
    "answer_surrogate": lambda made: made._replace(answers=["\ud800"] * len(made.rewards)),
    "answer_evil": lambda made: made._replace(answers=[Evil()] * len(made.rewards)),
    "empty_rewards": lambda made: made._replace(rewards={}),
    "reward_sum": lambda made: made._replace(
        rewards={"a": [3e38] * len(made.rewards), "b": [3e38] * len(made.rewards)}
    ),
    "reward_names": lambda made: made._replace(rewards={"\ud800": [1.0] * len(made.rewards)}),
}
"""What a step returns."""

HANGING: dict[str, Callable[[], Any]] = {
    "hang": lambda: time.sleep(3600),
    "hang_evil_repr": lambda: _raise(ValueError(Evil(hangs=True))),
}
"""What ends by the time limit only."""

KILLING: dict[str, Callable[[], Any]] = {
    "os_exit": lambda: os._exit(3),
    "os_exit_zero": lambda: os._exit(0),
    "kill": lambda: _end_by(signal.SIGKILL),
    "terminate": lambda: _end_by(signal.SIGTERM),
    "segfault": lambda: _end_by(signal.SIGSEGV),
    "abort": os.abort,
    "group_kill": _end_group,
    "close_descriptors": lambda: os.closerange(0, 4096),
    "deaf": _deafen,
    "garbage": lambda: [os.write(number, b"\xff" * 64) for number in _sockets()],
    "endless_message": lambda: [os.write(number, b"\xff\xff\xff\xff") for number in _sockets()],
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "bomb": _bomb,
    "ignores_signals": _ignore_signals,
}
"""What a thread cannot be kept from: only a process of its own helps against it."""

HARMLESS: dict[str, Callable[[], Any]] = {
    "print_flood": lambda: [print("x" * 1000) for _ in range(5000)],
    "stderr_flood": lambda: [os.write(2, b"y" * 10_000) for _ in range(1000)],
    "close_stdout": lambda: os.close(1),
    "thread": lambda: threading.Thread(target=time.sleep, args=(3600,)).start(),
    "child": lambda: subprocess.Popen(["sleep", SLEEP]),
    "chdir": lambda: os.chdir("/"),
    "signals": lambda: (signal.signal(signal.SIGTERM, signal.SIG_IGN), signal.alarm(0)),
    "json": _break_json,
    "random": lambda: random.seed(0),
    "environ": lambda: os.environ.clear(),
    "gc": gc.disable,
    "recursion_limit": lambda: sys.setrecursionlimit(10_000),
    "modules": lambda: [sys.modules.pop(name) for name in list(sys.modules) if name.startswith("kuberoll_workers")],
}
"""What a process of its own survives, so that even the row itself is played to its end."""


def _sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            continue
    return found


class Misbehaving:
    """One turn; all rows are good but those whose metadata has something to `do`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def step(self, logs: list[Any], metadata: list[Any]) -> Any:
        size = len(logs)
        made = EnvironmentReturn(
            [{"role": "environment", "content": "well"}] * size,
            [{"n": state["n"]} for state in metadata],
            None,
            [1.0] * size,
            [True] * size,
        )
        for row, state in enumerate(metadata):
            kind = state.get("do")
            if kind in METADATA:
                made.metadata[row] = METADATA[kind]()  # type: ignore[index]
            elif kind in REWARDS:
                made.rewards[row] = REWARDS[kind]
            elif kind in RETURNED:
                return RETURNED[kind](made)
            elif kind == "unusable_row":
                raise UnusableRow("\ud800" * 5)
            elif kind == "tensor_metadata":
                made.metadata[row] = {"n": _tensor(), "f": numpy.float32(1.5), "t": (1, 2)}  # type: ignore[index]
            elif kind == "changes_inputs":
                state.clear()
                state["n"] = {1, 2}
                logs[row].append(object())
                made.metadata[row] = None  # type: ignore[index]
            elif kind is not None:
                for table in (RAISED, HANGING, KILLING, HARMLESS):
                    if kind in table:
                        table[kind]()
        return made

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}
