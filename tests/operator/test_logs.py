"""`kuberoll logs`: lines of many pods in one order, each once, as text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_operator import names
from kuberoll_operator.console import pod_logs
from kuberoll_operator.console.log_lines import LogLine, event_line, format_line, nanoseconds, seconds_of, stamped_line
from kuberoll_operator.console.pod_logs import COMPONENTS, JobLogs, LogFilter, merge_lines
from kuberoll_operator.kube.errors import Forbidden
from kuberoll_operator.model import Object
from tests.operator.emulator import Emulator, Fault
from tests.operator.support import NAMESPACE, manifest

ALL = frozenset(COMPONENTS)


def plain(source: str, text: str, *, when: int = 0, width: int = 1, raw: bool = False) -> str:
    import click

    return click.unstyle(format_line(LogLine(when, source, text), width=width, raw=raw))


# Lines.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1970-01-01T00:00:01Z", 1_000_000_000),
        ("1970-01-01T00:00:00.5Z", 500_000_000),
        ("1970-01-01T00:00:00.000000001Z", 1),
        ("1970-01-01T02:00:00.25+02:00", 250_000_000),
        ("1970-01-01T00:00:00", None),
        ("1970-13-01T00:00:00Z", None),
        ("Traceback", None),
    ],
)
def test_times(text: str, expected: int | None) -> None:
    assert nanoseconds(text) == expected


@given(st.integers(0, 4_000_000_000), st.integers(0, 999_999_999), st.integers(0, 9))
def test_trailing_zeros_of_a_time_do_not_matter(second: int, fraction: int, digits: int) -> None:
    fraction -= fraction % 10 ** (9 - digits)
    text = f"{fraction:09d}"[:digits]
    stamp = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S") + (f".{text}" if text else "") + "Z"
    assert nanoseconds(stamp) == second * 1_000_000_000 + fraction


def test_a_line_has_its_time_and_its_text() -> None:
    assert stamped_line("p", b"1970-01-01T00:00:01Z hello  world \n", 5) == LogLine(1_000_000_000, "p", "hello  world ")
    assert stamped_line("p", b"1970-01-01T00:00:01Z ", 5) == LogLine(1_000_000_000, "p", "")
    assert stamped_line("p", b"no time", 5) == LogLine(5, "p", "no time")


def test_lines_are_shown_as_text() -> None:
    line = {"time": "t", "level": "info", "logger": "l", "message": "52 of 500 are stored", "job": "first"}
    assert (
        plain("pod", json.dumps(line), width=5, when=61_002_000_000) == "pod   | 00:01:01.002 info 52 of 500 are stored"
    )
    broken = {"level": "error", "message": "broken", "traceback": "Traceback:\n  File"}
    assert plain("p", json.dumps(broken)).splitlines() == [
        "p | 00:00:00.000 error broken",
        "p | 00:00:00.000 error Traceback:",
        "p | 00:00:00.000 error   File",
    ]
    phase = {"event": "phase", "name": "engine", "seconds": 6.362802}
    assert plain("p", json.dumps(phase)) == "p | 00:00:00.000 phase name=engine seconds=6.36"
    for text in ("printed", '{"no": "message"}', "{broken", "[1]"):
        assert plain("p", text) == f"p | 00:00:00.000 {text}"
    assert plain("p", json.dumps(line), raw=True) == f"p | 00:00:00.000 {json.dumps(line)}"


def test_what_a_program_prints_does_not_reach_the_terminal_as_commands() -> None:
    assert plain("p", "a\x1b[2Jb\x07c\x1b]0;title\x07\tend\r") == "p | 00:00:00.000 abc]0;title end"
    assert "\x1b" not in plain("p", json.dumps({"message": "x\x1b[31mred"}))


def test_durations() -> None:
    assert [seconds_of(text) for text in ("90", "90s", "10m", "1h30m", "2h")] == [90, 90, 600, 5400, 7200]
    for text in ("", "soon", "-1", "1d"):
        with pytest.raises(ValueError, match="write seconds, 10m or 1h30m"):
            seconds_of(text)


def test_events() -> None:
    event: Object = {"eventTime": "1970-01-01T00:00:01.000002Z", "type": "Warning", "reason": "Failed", "note": "why"}
    line = event_line(event)
    assert line is not None
    assert line.when == 1_000_002_000
    assert plain("o", line.text) == "o | 00:00:00.000 warning Failed: why"
    again = event_line({**event, "series": {"lastObservedTime": "1970-01-01T00:00:09Z"}})
    assert again is not None
    assert again.when == 9_000_000_000
    assert event_line({"reason": "x"}) is None


@given(st.lists(st.lists(st.integers(0, 50)), max_size=5))
def test_lines_of_sources_that_are_in_order_come_in_order(times: list[list[int]]) -> None:
    async def source(number: int, when: list[int]) -> AsyncIterator[LogLine]:
        for count, time in enumerate(sorted(when)):
            yield LogLine(time, str(number), str(count))

    async def collect() -> list[LogLine]:
        return [line async for line in merge_lines([source(number, when) for number, when in enumerate(times)])]

    found = asyncio.run(collect())
    assert [line.when for line in found] == sorted(time for when in times for time in when)
    for number in range(len(times)):
        own = [int(line.text) for line in found if line.source == str(number)]
        assert own == sorted(own)


# A job's.


def stamp(second: float) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def pod(name: str, component: str, container: str, *, running: bool = True, restarts: int = 0) -> Object:
    state = {"running": {}} if running else {"terminated": {"exitCode": 0}}
    labels = {names.JOB_LABEL: "puzzle", names.COMPONENT_LABEL: component}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "spec": {"containers": [{"name": container}]},
        "status": {"containerStatuses": [{"name": container, "restartCount": restarts, "state": state}]},
    }


def event(number: int, second: float, reason: str) -> Object:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"puzzle.{number}", "namespace": NAMESPACE},
        "eventTime": stamp(second),
        "type": "Normal",
        "reason": reason,
        "note": "now",
        "regarding": {"kind": "RolloutJob", "name": "puzzle", "namespace": NAMESPACE},
    }


@pytest.fixture
def emulator() -> Emulator:
    """A job with a worker, an engine and two events."""
    found = Emulator()
    found.put(manifest())
    found.put(pod("w", names.WORKERS, "worker"))
    found.put(pod("g", names.GENERATION, "generation"))
    found.put(event(1, 10.0, "Starting"))
    found.put(event(2, 13.2, "Running"))
    for second in (11, 13, 15):
        found.log("w", "worker", f"{stamp(second)} w{second}")
        found.log("g", "generation", f"{stamp(second + 0.5)} g{second}")
    found.open_logs = {("w", "worker"), ("g", "generation")}
    return found


@asynccontextmanager
async def logs(
    emulator: Emulator, directory: Path, wanted: LogFilter, notes: list[str] | None = None
) -> AsyncIterator[JobLogs]:
    async with emulator.connected(directory) as connection:
        yield JobLogs(connection, NAMESPACE, "puzzle", wanted, note=(notes if notes is not None else []).append)


def said(lines: list[LogLine]) -> list[str]:
    return [plain("x", line.text).split(" ", 3)[-1] for line in lines]


async def history(emulator: Emulator, directory: Path, wanted: LogFilter, notes: list[str] | None = None) -> list[str]:
    async with logs(emulator, directory, wanted, notes) as found:
        return said([line async for line in found.history()])


async def test_all_that_there_is_in_order_of_time(emulator: Emulator, tmp_path: Path) -> None:
    assert await history(emulator, tmp_path, LogFilter(ALL)) == [
        "info Starting: now",
        *("w11", "g11", "w13"),
        "info Running: now",
        *("g13", "w15", "g15"),
    ]


async def test_parts_times_and_tails(emulator: Emulator, tmp_path: Path) -> None:
    workers = frozenset({names.WORKERS})
    assert await history(emulator, tmp_path, LogFilter(workers)) == ["w11", "w13", "w15"]
    since = int(13.1e9)
    assert await history(emulator, tmp_path, LogFilter(ALL, since=since)) == ["info Running: now", "g13", "w15", "g15"]
    assert await history(emulator, tmp_path, LogFilter(workers, tail=1)) == ["w15"]


async def test_predecessors_that_crashed(emulator: Emulator, tmp_path: Path) -> None:
    emulator.put(pod("g", names.GENERATION, "generation", restarts=1))
    emulator.log("g", "generation previous", f"{stamp(10.9)} crashed")
    generation = frozenset({names.GENERATION})
    assert await history(emulator, tmp_path, LogFilter(generation)) == ["g11", "g13", "g15"]
    assert await history(emulator, tmp_path, LogFilter(generation, previous=True)) == ["crashed", "g11", "g13", "g15"]


async def test_a_kubelet_that_does_not_answer_hides_no_other_log(emulator: Emulator, tmp_path: Path) -> None:
    away = Fault(
        lambda request: request.path.endswith("/pods/g/log"), 500, {"message": "dial tcp: refused"}, times=None
    )
    emulator.faults.append(away)
    notes: list[str] = []
    assert await history(emulator, tmp_path, LogFilter(frozenset({names.WORKERS, names.GENERATION})), notes) == [
        "w11",
        "w13",
        "w15",
    ]
    assert notes == ["cannot read the log of g now: dial tcp: refused"]


async def test_a_log_that_may_not_be_read_is_an_error(emulator: Emulator, tmp_path: Path) -> None:
    message = 'User "jane" cannot get resource "pods/log" in API group "" in the namespace "rollouts"'
    body = {"message": message, "reason": "Forbidden"}
    emulator.faults.append(Fault(lambda request: request.path.endswith("/log"), 403, body, times=None))
    with pytest.raises(Forbidden):
        await history(emulator, tmp_path, LogFilter(ALL))


async def test_events_that_may_not_be_read_are_left_out_with_a_word(emulator: Emulator, tmp_path: Path) -> None:
    message = (
        'events.events.k8s.io is forbidden: User "jane" cannot list resource "events" in API group "events.k8s.io" '
        'in the namespace "rollouts"'
    )
    body = {"reason": "Forbidden", "message": message}
    emulator.faults.append(Fault(lambda request: request.plural == "events", 403, body, times=None))
    notes: list[str] = []
    assert "w11" in await history(emulator, tmp_path, LogFilter(ALL), notes)
    (note,) = notes
    assert "the operator's events are not shown: missing permission: jane may not list events.events.k8s.io" in note


async def test_following_tells_each_line_once_and_finds_new_pods(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_logs, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(pod_logs, "_WINDOW_SECONDS", 0.01)
    lines: list[str] = []
    came = asyncio.Event()

    async def follow() -> None:
        async with logs(emulator, tmp_path, LogFilter(ALL)) as found:
            for part in (found.history(), found.live()):
                async for line in part:
                    lines.extend(said([line]))
                    came.set()

    async def until(text: str) -> None:
        async with asyncio.timeout(240):
            while text not in lines:
                came.clear()
                await came.wait()

    following = asyncio.create_task(follow())
    # Within the second of what was told already, and another one at the very same time.
    emulator.log("w", "worker", f"{stamp(15.1)} w15.1")
    await until("w15.1")
    emulator.log("w", "worker", f"{stamp(15.1)} again")
    await until("again")
    # The kubelet, and then the API server, do not answer for a while.
    away = Fault(
        lambda request: "/log" in request.path or request.plural == "events", 500, {"message": "away"}, times=6
    )
    emulator.faults.append(away)
    emulator.end_log("w", "worker")
    await emulator.until(lambda: away.times == 0)
    emulator.log("w", "worker", f"{stamp(15.2)} after")
    emulator.open_logs.add(("w", "worker"))
    await until("after")
    emulator.put(pod("f", names.FINISH, "finish"))
    emulator.log("f", "finish", f"{stamp(16)} f16")
    await until("f16")
    # The engine is started anew.
    emulator.end_log("g", "generation")
    emulator.put(pod("g", names.GENERATION, "generation", restarts=1))
    emulator.logs["g", "generation"] = [f"{stamp(17)} g17"]
    await until("g17")
    emulator.put(event(3, 18.0, "Completed"))
    await until("info Completed: now")
    for name, component, container in (
        ("w", names.WORKERS, "worker"),
        ("g", names.GENERATION, "generation"),
        ("f", names.FINISH, "finish"),
    ):
        emulator.end_log(name, container)
        emulator.put(pod(name, component, container, running=False))
    done = {"conditions": [{"type": "Complete", "status": "True"}]}
    emulator.put({**manifest(), "status": done})
    async with asyncio.timeout(240):
        await following
    assert len(lines) == len(set(lines)), lines
    assert {"w15.1", "again", "f16", "g17", "info Completed: now"} < set(lines)
