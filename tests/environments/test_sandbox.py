"""What an environment in a process of its own can reach, tried from inside."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kuberoll_workers.environments import landlock, sandbox
from kuberoll_workers.environments.processes import ProcessExecutor
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.environments.sandbox import Sandbox

SPEC = PlainSpec(name="prying", type=None, entrypoint="tests.environments.prying:Prying", config={})

needs_landlock = pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock")

Try = Callable[[str, str | Path | int], "asyncio.Future[str]"]


@asynccontextmanager
async def prying(given: Sandbox | None = None) -> AsyncIterator[Try]:
    runner = EnvironmentRunner(ProcessExecutor(SPEC, processes=1, timeout=60, sandbox=given), max_batch=64)

    async def attempt(what: str, at: str | Path | int) -> str:
        return (await runner.step([], {"try": what, "at": str(at)})).content

    try:
        yield attempt  # type: ignore[misc]
    finally:
        await runner.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with a key in it, and with data."""
    place = tmp_path / "home"
    (place / ".ssh").mkdir(parents=True)
    (place / ".ssh" / "id").write_text("a key")
    (place / "data").write_text("data")
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("MY_SECRET", "secret")
    monkeypatch.setenv("KUBEROLL_TOKEN_GENERATE", "token")
    monkeypatch.setenv("HF_HOME", "/models")
    return place


@needs_landlock
async def test_what_is_not_an_environment_s_is_closed_to_it(tmp_path: Path, home: Path) -> None:
    output, token, elsewhere = tmp_path / "output", tmp_path / "scratch" / "generation.json", tmp_path / "elsewhere"
    for path in (output / "shard-00000.jsonl", token, elsewhere / "file"):
        path.parent.mkdir()
        path.write_text("not yours")
    parent, opened = os.getpid(), token.open()
    closed: list[tuple[str, str | Path | int]] = [
        ("read", token),
        ("cat", token),
        ("read", output / "shard-00000.jsonl"),
        ("write", output / "shard-00000.jsonl"),
        ("write", output / "new"),
        ("remove", output / "shard-00000.jsonl"),
        ("rename", output / "shard-00000.jsonl"),
        ("link", output / "shard-00000.jsonl"),
        ("read", home / ".ssh" / "id"),
        ("write", home / "data"),
        ("write", elsewhere / "new"),
        ("write", "/etc/kuberoll-was-here"),
        ("write", Path(__file__).parent / "was-here"),
        ("variable", "MY_SECRET"),
        ("variable", "KUBEROLL_TOKEN_GENERATE"),
        ("read", f"/proc/{parent}/environ"),
        ("read", f"/proc/{parent}/mem"),
        ("read", f"/proc/{parent}/maps"),
        ("read", f"/proc/{parent}/fd/{opened.fileno()}"),
        ("read", f"/proc/{parent}/root{token}"),
        ("trace", parent),
        ("memory", parent),
        ("device", "/dev/kmsg"),
    ]
    if landlock.abi() >= 6:
        closed.append(("signal", parent))
    async with prying(Sandbox(protected=[str(output), str(token.parent)])) as attempt:
        said = {(what, str(at)): await attempt(what, at) for what, at in closed}
    opened.close()
    assert {key: text for key, text in said.items() if text.startswith("ok")} == {}
    assert (output / "shard-00000.jsonl").read_text() == "not yours"


async def test_what_environments_need_is_open_to_them(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / "runs").mkdir(parents=True)
    for path in (tmp_path / "work" / "words.txt", tmp_path / "work" / "runs" / "shard", tmp_path / "models"):
        path.write_text("words")
    # The output lies in the working directory, as it does by default.
    monkeypatch.chdir(tmp_path / "work")
    given = Sandbox(protected=["runs"], readable=[str(tmp_path / "models"), str(home)], writable=[str(home / "data")])
    async with prying(given) as attempt:
        assert await attempt("read", "words.txt") == "ok words"
        assert await attempt("read", tmp_path / "models") == "ok words"
        assert await attempt("read", home / "data") == "ok data"
        assert await attempt("write", home / "data") == "ok written"
        assert (await attempt("read", __file__)).startswith('ok """What an environment')
        assert await attempt("list", tmp_path / "work") == "ok runs,words.txt"
        assert await attempt("variable", "HF_HOME") == "ok /models"
        assert await attempt("scratch", "") == "ok written"
        assert await attempt("program", "hello") == "ok hello"
        assert await attempt("cat", "words.txt") == "ok words"
        assert await attempt("lock", "") == "ok locked"
        assert await attempt("import", "numpy") == "ok numpy"
        assert await attempt("resolve", "localhost") in ("ok 127.0.0.1", "ok ::1")
        assert await attempt("device", "/dev/null") == "ok 1"
        if landlock.abi():
            # Not even what is asked for by name opens what is protected, or the keys in a home that is asked for.
            assert await attempt("read", "runs/shard") == "PermissionError"
            assert await attempt("read", home / ".ssh" / "id") == "PermissionError"


async def test_a_variable_that_is_asked_for_is_there(home: Path) -> None:
    async with prying(Sandbox(variables=["MY_SECRET"])) as attempt:
        assert await attempt("variable", "MY_SECRET") == "ok secret"
        assert await attempt("variable", "KUBEROLL_TOKEN_GENERATE") == "KeyError"


async def test_no_descriptor_is_inherited(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        async with prying() as attempt:
            # Standard input, the pipe of what it prints, twice, and its channel to the worker.
            assert await attempt("descriptors", "") == "ok /dev/null,pipe,pipe,socket"


async def test_its_scratch_directory_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with prying() as attempt:
        assert await attempt("scratch", "") == "ok written"
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == []


def test_a_process_can_close_itself_to_others_of_its_user() -> None:
    pid = os.fork()
    if pid == 0:
        sandbox.hide_from_others()
        # The files of a process that is closed belong to root.
        os._exit(0 if os.stat("/proc/self/environ").st_uid == 0 and _dumpable() == 0 else 1)
    assert os.waitpid(pid, 0)[1] == 0


def _dumpable() -> int:
    import ctypes

    pr_get_dumpable = 3
    return int(ctypes.CDLL(None).prctl(pr_get_dumpable, 0, 0, 0, 0))
