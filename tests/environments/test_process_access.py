"""What an environment in a process of its own can reach, tried from inside."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from kuberoll_workers.environments import landlock, mounts, process_access
from kuberoll_workers.environments.child import STACK_FILE
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.processes import ProcessExecutor
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.local.engines import engines_directory

SPEC = PlainSpec(name="prying", type=None, entrypoint="tests.environments.prying:Prying", config={})

needs_landlock = pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock")

Try = Callable[[str, str | Path | int], "asyncio.Future[str]"]


needs_closed_sockets = pytest.mark.skipif(
    landlock.abi() < landlock.SOCKETS_SINCE and not mounts.is_available(),
    reason="this kernel has no Landlock of version 9, and the system gives its users no namespaces",
)


@asynccontextmanager
async def prying(given: ProcessAccess | None = None) -> AsyncIterator[Try]:
    runner = EnvironmentRunner(ProcessExecutor(SPEC, processes=1, timeout=60, access=given), max_batch=64)

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
    async with prying(ProcessAccess(protected=[str(output), str(token.parent)])) as attempt:
        said = {(what, str(at)): await attempt(what, at) for what, at in closed}
    opened.close()
    assert {key: text for key, text in said.items() if text.startswith("ok")} == {}
    assert (output / "shard-00000.jsonl").read_text() == "not yours"


VIEW = """
import os, sys, ctypes
from kuberoll_workers.environments import mounts
user = int(sys.argv[1])
if user != os.getuid():
    os.setgid(user)
    os.setuid(user)
    # As a program that this user has started.
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
if not mounts.enter_view(writable=[sys.argv[2]]):
    sys.exit("no namespaces")
os.mkdir(sys.argv[2] + "/made")
os.chmod(sys.argv[2], 0o700)
try:
    os.chmod(sys.argv[3], 0o700)
except OSError as error:
    print(error.strerror)
"""


def view(user: int, directory: Path) -> str:
    """What a program of a user is told that changes a mode outside of the directory that it may change."""
    own, other = directory / "own \t directory", directory / "other"
    for path in (own, other):
        path.mkdir()
        os.chown(path, user, user)
    directory.chmod(0o755)
    command = [sys.executable, "-c", VIEW, str(user), str(own), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (own / "made").is_dir() or done.returncode
    return (done.stdout or done.stderr).strip()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory that other users can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def test_the_view_is_made_for_a_user_without_privileges(scratch: Path) -> None:
    user = os.getuid() or 65534
    answer = view(user, scratch)
    if answer == "no namespaces":
        pytest.skip("this system gives its users no namespaces")
    assert answer == "Read-only file system"


async def test_what_is_not_writable_keeps_its_mode_owner_and_times(tmp_path: Path, scratch: Path) -> None:
    if view(os.getuid(), scratch) == "no namespaces":
        pytest.skip("this system gives its users no namespaces")
    stored, own = tmp_path / "output" / "shard", tmp_path / "own"
    stored.parent.mkdir()
    own.mkdir()
    stored.write_text("stored")
    before = stored.stat()
    places = (stored, stored.parent, own)
    async with prying(
        ProcessAccess(protected=[str(stored.parent)], readable=[str(tmp_path)], writable=[str(own)])
    ) as attempt:
        for what in ("mode", "owner", "times", "attribute"):
            assert [await attempt(what, place) for place in places] == ["OSError", "OSError", "ok changed"]
    assert stored.stat() == before


async def test_what_environments_need_is_open_to_them(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / "runs").mkdir(parents=True)
    for path in (tmp_path / "work" / "words.txt", tmp_path / "work" / "runs" / "shard", tmp_path / "models"):
        path.write_text("words")
    # The output lies in the working directory, as it does by default.
    monkeypatch.chdir(tmp_path / "work")
    given = ProcessAccess(
        protected=["runs"], readable=[str(tmp_path / "models"), str(home)], writable=[str(home / "data")]
    )
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
            assert await attempt("read", home / ".ssh" / "id") in ("PermissionError", "FileNotFoundError")


@contextmanager
def listening(*paths: Path) -> Iterator[None]:
    """Unix sockets of this process, of streams; those whose names end in `.datagrams` of datagrams."""
    with ExitStack() as stack:
        for path in paths:
            kind = socket.SOCK_DGRAM if path.name.endswith(".datagrams") else socket.SOCK_STREAM
            server = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            server.bind(str(path))
            stack.callback(path.unlink)
            if kind == socket.SOCK_STREAM:
                server.listen()
        yield


@needs_closed_sockets
async def test_sockets_are_closed_that_it_was_not_given(home: Path, scratch: Path) -> None:
    given, beside, datagrams = home / "given.sock", home / "beside.sock", home / "bus.datagrams"
    later, agent = scratch / "later.sock", home / ".ssh" / "agent.sock"
    with listening(given, beside, datagrams, agent):
        # A home is readable; a socket in it is one's own only by its name, or where one may write.
        async with prying(ProcessAccess(readable=[str(home), str(given)])) as attempt:
            assert await attempt("own socket", "") == "ok connected"
            with listening(later):
                reached = {path.name: await attempt("connect", path) for path in (given, beside, agent, later)}
            reached[datagrams.name] = await attempt("send", datagrams)
    assert {name for name, said in reached.items() if said.startswith("ok")} == {"given.sock"}


@needs_landlock
@pytest.mark.parametrize("place", [".local/state", "elsewhere"])
async def test_kuberoll_s_own_state_is_closed_to_it(home: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    if place == "elsewhere":
        monkeypatch.setenv("XDG_STATE_HOME", str(home / place))
    else:
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    engines = engines_directory()
    assert engines.is_relative_to(home / place)
    engines.mkdir(parents=True)
    (engines / "job.json").write_text("tokens")
    async with prying(ProcessAccess(readable=[str(home)])) as attempt:
        assert await attempt("read", home / "data") == "ok data"
        assert await attempt("read", engines / "job.json") == "PermissionError"


@pytest.mark.skipif(not mounts.is_available(), reason="this system gives its users no namespaces")
async def test_its_shared_memory_is_its_own() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
        async with prying() as attempt:
            assert await attempt("lock", "") == "ok locked"
            assert await attempt("list", "/dev/shm") == "ok "
            assert await attempt("write", shared.name) == "ok written"
        assert shared.read() == b""


async def test_a_variable_that_is_asked_for_is_there(home: Path) -> None:
    async with prying(ProcessAccess(variables=["MY_SECRET"])) as attempt:
        assert await attempt("variable", "MY_SECRET") == "ok secret"
        assert await attempt("variable", "KUBEROLL_TOKEN_GENERATE") == "KeyError"


async def test_no_descriptor_is_inherited(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        async with prying() as attempt:
            # Standard input, the pipe of what it prints, twice, its channel to the worker, and a file of its own.
            found = (await attempt("descriptors", "")).removeprefix("ok ").split(",")
            assert [path for path in found if not path.endswith(STACK_FILE)] == ["/dev/null", "pipe", "pipe", "socket"]


async def test_its_scratch_directory_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with prying() as attempt:
        assert await attempt("scratch", "") == "ok written"
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == []


def test_a_process_can_close_itself_to_others_of_its_user() -> None:
    pid = os.fork()
    if pid == 0:
        process_access.hide_from_others()
        # The files of a process that is closed belong to root.
        os._exit(0 if os.stat("/proc/self/environ").st_uid == 0 and _dumpable() == 0 else 1)
    assert os.waitpid(pid, 0)[1] == 0


def _dumpable() -> int:
    import ctypes

    pr_get_dumpable = 3
    return int(ctypes.CDLL(None).prctl(pr_get_dumpable, 0, 0, 0, 0))
