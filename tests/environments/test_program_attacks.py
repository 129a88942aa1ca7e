"""Confined programs that attack what confines them."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kuberoll_workers.environments import process_tree
from kuberoll_workers.environments.programs import Limits, Outcome, Program, ProgramRunner
from tests.environments.attacks import LIMITED, REACHING, WITHOUT_EFFECT, Target, kinds_of, limits_of

MIB = 1 << 20
LIMITS = limits_of("")


@pytest.fixture(scope="module", params=["scoped", pytest.param("supervised", marks=pytest.mark.slow)])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProgramRunner]:
    """Runs programs with signals that Landlock or the supervisor restricts, below a temporary directory of its own."""
    with (
        pytest.MonkeyPatch.context() as patch,
        ProgramRunner(parallel=2, supervise_signals=request.param == "supervised") as found,
    ):
        patch.setenv("KUBEROLL_TOKEN_GENERATE", "kuberoll-secret")
        patch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("programs")))
        found.check()
        yield found


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    file = tmp_path / "run" / "generation.json"
    file.parent.mkdir()
    file.write_text("kuberoll-secret")
    tcp, abstract, named = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), _unix(tmp_path)
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    abstract.bind(f"\0kuberoll-{os.getpid()}")
    datagrams.bind(f"{named.getsockname()}.datagram")
    abstract.listen()
    stopped = threading.Event()
    answering = threading.Thread(target=_answer, args=(tcp, stopped))
    answering.start()
    yield Target(
        file=str(file),
        directory=str(file.parent),
        process=os.getpid(),
        port=tcp.getsockname()[1],
        abstract=f"kuberoll-{os.getpid()}",
        path=named.getsockname(),
    )
    stopped.set()
    socket.create_connection(tcp.getsockname()).close()
    answering.join()
    for item in (tcp, abstract, named, datagrams):
        item.close()


def _unix(folder: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(folder / "socket"))
    made.listen()
    return made


def _answer(server: socket.socket, stopped: threading.Event) -> None:
    while not stopped.is_set():
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")


def run(runner: ProgramRunner, source: str, *, mark: str = "", stdin: bytes = b"", limits: Limits = LIMITS) -> Outcome:
    program = Program.python(source, limits=limits, stdin=stdin)
    return runner.run(dataclasses.replace(program, variables={"KUBEROLL_TEST_MARK": mark}))


def with_mark(mark: str) -> list[str]:
    """Processes of this machine that inherited a mark."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", REACHING)
def test_nothing_outside_is_reached(runner: ProgramRunner, target: Target, name: str) -> None:
    source = REACHING[name].format(**dataclasses.asdict(target))
    outcome = run(runner, source)
    assert "REACHED" not in outcome.stdout, outcome
    assert "kuberoll-secret" not in outcome.stdout + outcome.stderr.replace(source, "")
    # It ended by itself: it was refused, and the confinement did not break.
    assert outcome.kind in ("ok", "error"), outcome
    assert "SyntaxError" not in outcome.stderr
    assert Path(target.file).read_text() == "kuberoll-secret"
    assert os.listdir(target.directory) == ["generation.json"]


# What even a program that is not confined does not get here, or what is there only for one that is.
_REFUSED_TO_ALL = {
    "read its own variables", "read variables of other processes", "open the terminal", "gain privileges",
    "use a descriptor that was left open", "speak on the supervisor's channel", "set an attribute",
    "write among the modules", "send by UDP", "ask the policy", "trace its parent", "queue a signal to its parent",
    "hide by the upper half of a register", "use io_uring",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REACHING.keys() - _REFUSED_TO_ALL))
def test_the_attacks_work_without_the_confinement(target: Target, tmp_path: Path, name: str) -> None:
    source = REACHING[name].format(**dataclasses.asdict(target))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "REACHED" in done.stdout, done.stderr
    Path("/dev/shm/kuberoll-was-here").unlink(missing_ok=True)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_modes_owners_and_times_of_others_files_stay(runner: ProgramRunner, target: Target, name: str) -> None:
    paths = [Path(target.file), Path(target.directory)]
    before = [path.stat() for path in paths]
    outcome = run(runner, WITHOUT_EFFECT[name].format(**dataclasses.asdict(target)))
    assert outcome.kind == "ok", outcome
    after = [path.stat() for path in paths]
    assert [(s.st_mode, s.st_uid, s.st_mtime, s.st_ctime) for s in before] == [
        (s.st_mode, s.st_uid, s.st_mtime, s.st_ctime) for s in after
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITED)
def test_nothing_is_used_up_and_nothing_is_left(runner: ProgramRunner, name: str) -> None:
    source, _ = LIMITED[name]
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    outcome = run(runner, source, mark=mark, stdin=b"x" * MIB, limits=limits_of(name))
    assert outcome.kind in kinds_of(name), outcome
    assert with_mark(mark) == []
    assert os.listdir(tempfile.gettempdir()) == []
    assert len(outcome.stdout) + len(outcome.stderr) <= 2 * LIMITS.output + 200
    # The next program runs as if nothing had happened.
    assert run(runner, "print('well')").stdout == "well\n"


def test_the_number_of_processes_is_limited(runner: ProgramRunner) -> None:
    counted = run(
        runner,
        "import os, time\ncount = 1\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(1000)\n        count += 1\n"
        "except BlockingIOError: print(count)",
    )
    assert int(counted.stdout) == LIMITS.processes
    # Those that have ended make room for others.
    again = run(
        runner,
        "import os\nfor _ in range(50):\n    if os.fork() == 0: os._exit(0)\n    os.wait()\nprint('done')",
    )
    assert again.stdout == "done\n", again


def test_a_pickle_that_is_printed_stays_text(runner: ProgramRunner, tmp_path: Path) -> None:
    source = (
        "import pickle, sys\nclass Evil:\n    def __reduce__(self):\n        import os\n"
        f"        return os.system, ('touch {tmp_path}/pwned',)\nsys.stdout.buffer.write(pickle.dumps(Evil()))"
    )
    outcome = run(runner, source)
    assert outcome.kind == "ok"
    assert isinstance(outcome.stdout, str)
    assert os.listdir(tmp_path) == []


def test_a_program_whose_client_goes_is_ended(runner: ProgramRunner) -> None:
    mark = f"mark-{os.getpid()}-gone"
    other = ProgramRunner(parallel=1)
    other.check()
    program = Program.python("import time; time.sleep(1000)", limits=Limits(wall_seconds=600))
    program = dataclasses.replace(program, variables={"KUBEROLL_TEST_MARK": mark})
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryDirectory() as scratch, ours:
        with theirs:
            socket.send_fds(other._started(), [b"."], [theirs.fileno()])
        Path(scratch, "main.py").write_bytes(program.files["main.py"])
        ours.sendall(program.to_json(scratch) + b"\n")
        while not with_mark(mark):
            time.sleep(0.01)
        ours.close()
        while with_mark(mark):
            time.sleep(0.01)
    other.close()


@pytest.mark.slow
def test_what_a_killed_supervisor_leaves_is_ended(runner: ProgramRunner) -> None:
    mark = f"mark-{os.getpid()}-killed"
    with ProgramRunner(parallel=1) as other:
        other.check()
        assert other._launcher is not None
        failures: list[BaseException] = []
        source = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(1000)"
        program = Program.python(source, limits=Limits(wall_seconds=600))
        program = dataclasses.replace(program, variables={"KUBEROLL_TEST_MARK": mark})

        def ask() -> None:
            try:
                other.run(program)
            except BaseException as error:
                failures.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        while len(with_mark(mark)) < 2:
            time.sleep(0.01)
        [supervisor] = process_tree.children(other._launcher.pid)
        os.kill(supervisor, 9)
        asking.join()
        while with_mark(mark):
            time.sleep(0.01)
        assert "supervisor was killed" in str(failures[0])


_BEYOND_SEVERAL = """
import os, time
while not os.path.exists("go"): time.sleep(0.01)
held = b"x" * (128 << 20)
while {measure} < {seconds}: {wait}
open("beyond", "w").close()
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "source"),
    [
        # The kernel's own limit of a process is beyond this one by a second and more.
        (Limits(cpu_seconds=1, wall_seconds=600, memory=64 * MIB),
         _BEYOND_SEVERAL.format(measure="time.process_time()", seconds=1.1, wait="pass")),
        (Limits(cpu_seconds=60, wall_seconds=10, memory=64 * MIB),
         f"import time; began = time.monotonic()\n{_BEYOND_SEVERAL}".format(
             measure="time.monotonic() - began", seconds=10, wait="time.sleep(0.1)")),
    ],
    ids=["processor time", "elapsed time"],
)  # fmt: skip
def test_memory_is_told_before_the_time_that_it_took_to_fill(limits: Limits, source: str) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    outcomes: list[Outcome] = []
    with ProgramRunner(parallel=1) as other:
        other.check()
        assert other._launcher is not None
        asking = threading.Thread(target=lambda: outcomes.append(run(other, source, mark=mark, limits=limits)))
        asking.start()
        while not with_mark(mark):
            time.sleep(0.01)
        [supervisor] = process_tree.children(other._launcher.pid)
        # A busy machine lets a supervisor look late.
        os.kill(supervisor, signal.SIGSTOP)
        [program] = with_mark(mark)
        scratch = Path(f"/proc/{program}/cwd").resolve()
        (scratch / "go").touch()
        while not (scratch / "beyond").exists():
            time.sleep(0.01)
        os.kill(supervisor, signal.SIGCONT)
        asking.join()
    assert [outcome.kind for outcome in outcomes] == ["memory"], outcomes


def test_files_of_the_scratch_directory_are_private(runner: ProgramRunner) -> None:
    outcome = run(runner, "import os; open('f', 'w').close(); print(oct(os.stat('f').st_mode))")
    assert int(outcome.stdout, 8) & (stat.S_IRWXG | stat.S_IRWXO) == 0
