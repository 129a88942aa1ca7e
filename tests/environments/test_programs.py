"""Confined programs: what they have, what comes of them, and where none can be confined."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.data.causes import Cause, Evidence
from kuberoll_workers.environments.exception_causes import cause_of
from kuberoll_workers.environments.programs import (
    ConfinementUnavailable,
    Limits,
    Outcome,
    Program,
    ProgramFailed,
    ProgramRunner,
    SandboxUnavailable,
    scratch,
)
from kuberoll_workers.environments.programs.model import TRUNCATED
from kuberoll_workers.environments.programs.runner import DiskFull, ProgramLost


@pytest.fixture(scope="module")
def runner() -> Iterator[ProgramRunner]:
    with ProgramRunner(parallel=2) as found:
        yield found


def test_a_program_has_input_files_variables_and_a_directory(runner: ProgramRunner) -> None:
    source = (
        "import os, sys, tempfile\n"
        "open('written', 'w').write(open('given').read())\n"
        "print(sys.stdin.read(), open('written').read(), os.environ['NAME'], os.getcwd() == os.environ['HOME'])\n"
        "tempfile.NamedTemporaryFile().write(b'x')\n"
        "print('error', file=sys.stderr)"
    )
    program = Program.python(
        source, stdin="inp\N{LATIN SMALL LETTER U WITH DIAERESIS}t".encode(), files={"given": b"g"}
    )
    outcome = runner.run(dataclasses.replace(program, variables={"NAME": "value"}))
    assert (outcome.kind, outcome.exit_code, outcome.stderr) == ("ok", 0, "error\n")
    assert outcome.stdout == "inp\N{LATIN SMALL LETTER U WITH DIAERESIS}t g value True\n"
    assert outcome.cpu_seconds > 0
    assert outcome.wall_seconds > 0


@pytest.mark.parametrize(
    ("source", "code"), [("raise SystemExit(3)", 3), ("1/0", 1), ("import os; os.abort()", -6), ("(", 1)]
)
def test_a_program_that_fails_has_an_exit_code(runner: ProgramRunner, source: str, code: int) -> None:
    outcome = runner.run(Program.python(source))
    assert (outcome.kind, outcome.exit_code) == ("error", code)


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nt = threading.Thread(target=print, args=('ok',)); t.start(); t.join()",
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(\"ok\")'], "
        "capture_output=True, text=True).stdout, end='')",
        "import asyncio\nasync def main(): await asyncio.sleep(0); print('ok')\nasyncio.run(main())",
        "import multiprocessing as m\nif __name__ == '__main__':\n"
        "    p = m.get_context('fork').Process(target=print, args=('ok',)); p.start(); p.join()",
        "import concurrent.futures as f\nwith f.ThreadPoolExecutor(2) as p: print(list(p.map(str, ['ok']))[0])",
        "import sqlite3\nc = sqlite3.connect('db'); c.execute('create table t (x)'); c.commit(); print('ok')",
        "import os, shutil\nos.mkdir('d'); open('d/f', 'w').close(); shutil.copytree('d', 'e'); os.chmod('e/f', 0o600)\n"
        "shutil.rmtree('d'); os.rename('e', 'd'); os.utime('d/f'); print('ok')",
        "import zipfile\nwith zipfile.ZipFile('z', 'w') as z: z.writestr('a', 'b')\nzipfile.ZipFile('z').extractall()\n"
        "print('ok')",
        "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: print('ok')); signal.setitimer(0, 0.01); "
        "signal.pause()",
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and f(n - 1)\nf(10000); print('ok')",
        "import numpy as np\nassert (np.linalg.inv(np.eye(50)) == np.eye(50)).all(); print('ok')",
        "import os, datetime, random, decimal, json, re, heapq, bisect, itertools, functools, math\n"
        "print('ok' if os.cpu_count() else '')",
    ],
)
def test_ordinary_programs_run(runner: ProgramRunner, source: str) -> None:
    outcome = runner.run(Program.python(source))
    assert (outcome.kind, outcome.stdout) == ("ok", "ok\n"), outcome


def test_a_program_of_another_language_runs(runner: ProgramRunner) -> None:
    outcome = runner.run(Program(argv=["/bin/sh", "-c", "cat; exit 7"], stdin=b"text"))
    assert (outcome.kind, outcome.exit_code, outcome.stdout) == ("error", 7, "text")


def test_output_that_is_not_whole_says_so(runner: ProgramRunner) -> None:
    outcome = runner.run(Program.python("print('x' * 1000)", limits=Limits(output=100)))
    assert (outcome.kind, outcome.stdout) == ("output", "x" * 100 + TRUNCATED)
    exact = runner.run(Program.python("print('x' * 99)", limits=Limits(output=100)))
    assert (exact.kind, exact.stdout) == ("ok", "x" * 99 + "\n")
    binary = runner.run(Program.python("import sys; sys.stdout.buffer.write(bytes(range(256)))"))
    assert binary.stdout.startswith("\0\1")


def test_a_program_that_is_not_there_is_no_outcome(runner: ProgramRunner) -> None:
    with pytest.raises(ProgramFailed, match="No such file"):
        runner.run(Program(argv=["/usr/bin/there-is-no-such-program"]))


def test_many_programs_run_side_by_side(runner: ProgramRunner) -> None:
    outcomes = runner.run_all([Program.python(f"print({number})") for number in range(20)])
    assert [outcome.stdout for outcome in outcomes] == [f"{number}\n" for number in range(20)]


def test_a_launcher_that_was_killed_is_replaced() -> None:
    with ProgramRunner(parallel=1) as runner:
        runner.check()
        assert runner._launcher is not None
        runner._launcher.kill()
        runner._launcher.wait()
        assert runner.run(Program.python("print(1)")).stdout == "1\n"


@pytest.mark.slow
def test_a_program_whose_supervisor_is_killed_has_no_outcome() -> None:
    """As by the kernel, when the machine's memory is used up: nothing is known about the program."""
    with ProgramRunner(parallel=1) as runner, ThreadPoolExecutor(1) as threads:
        runner.check()
        assert runner._launcher is not None
        launcher = psutil.Process(runner._launcher.pid)
        running = threads.submit(runner.run, Program.python("while True: pass"))
        while not (supervisors := launcher.children()):
            threading.Event().wait(0.01)
        for supervisor in supervisors:
            supervisor.kill()
        with pytest.raises(ProgramLost) as lost:
            running.result()
        assert cause_of(lost.value) == Cause("ProcessKilled")
        assert runner.run(Program.python("print(1)")).stdout == "1\n"


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 4 MiB in which programs run."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"nothing can be mounted: {done.stderr.strip()}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.slow
def test_a_program_on_a_full_disk_has_no_outcome(runner: ProgramRunner, small_disk: Path) -> None:
    """Others have filled it; a program may catch the error, and print that its answer is wrong."""
    source = "try:\n    open('f', 'wb').write(b'x' * (1 << 20))\nexcept OSError:\n    print('wrong')"
    assert runner.run(Program.python(source)).stdout == ""
    with (small_disk / "of others").open("wb") as file:
        # There is room for the program.
        while shutil.disk_usage(small_disk).free > 40 << 10:
            file.write(b"x" * 4096)
            file.flush()
    with pytest.raises(DiskFull) as full:
        runner.run(Program.python(source))
    assert cause_of(full.value) == Cause("ResourceExhausted", Evidence(error="ENOSPC"))
    (small_disk / "of others").unlink()
    assert runner.run(Program.python(source)).stdout == ""
    # Beyond its own limit it is the program's doing.
    beyond = "open('f', 'wb').write(b'x' * (2 << 20))"
    assert runner.run(Program.python(beyond, limits=Limits(disk=1 << 20, file=1 << 22))).kind == "disk"


MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def small_machine() -> Iterator[ProgramRunner]:
    """A runner whose processes have 100 MiB together, as those of a container have."""
    group = MEMORY_CGROUP / f"kuberoll-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroups of memory can be made: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(100 << 20))
        with ProgramRunner(parallel=1) as runner:
            runner.check()
            assert runner._launcher is not None
            (group / "cgroup.procs").write_text(str(runner._launcher.pid))
            yield runner
    finally:
        while (group / "cgroup.procs").read_text():
            threading.Event().wait(0.01)
        group.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("by", ["itself", "a shell"])
def test_a_program_that_dies_of_the_machine_s_memory_has_no_outcome(small_machine: ProgramRunner, by: str) -> None:
    """It may hold a gigabyte, so that the machine had too little: no answer of the policy is wrong for that."""
    source = "held = [bytearray(1 << 20) for _ in range(400)]"
    if by == "itself":
        program = Program.python(source, limits=Limits(memory=1 << 30))
    else:
        argv = ["/bin/sh", "-c", f"{sys.executable} -c '{source}'; exit $?"]
        program = Program(argv=argv, limits=Limits(memory=1 << 30))
    with pytest.raises(ProgramLost, match="the machine's memory ran out") as lost:
        small_machine.run(program)
    assert cause_of(lost.value) == Cause("ProcessKilled", Evidence(signal="SIGKILL"))
    # And one that ends so by itself, or that is beyond its own limit, is what it was.
    source = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    outcome = small_machine.run(Program.python(source))
    assert (outcome.kind, outcome.exit_code) == ("error", -signal.SIGKILL)
    source = "held = [bytearray(1 << 20) for _ in range(400)]"
    assert small_machine.run(Program.python(source, limits=Limits(memory=50 << 20))).kind == "memory"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"argv": []}, "argv"),
        ({"argv": ["python"]}, "absolute path"),
        ({"argv": ["/bin/true"], "files": {"../x": b""}}, "without a directory"),
        ({"argv": ["/bin/true"], "files": {"": b""}}, "without a directory"),
    ],
)
def test_a_program_that_cannot_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Program(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("limits", [{"cpu_seconds": 0}, {"memory": 1}, {"processes": 0}, {"open_files": 3}])
def test_a_limit_that_cannot_be_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"limits.{next(iter(limits))}"):
        Limits(**limits)


# ---- where programs cannot be confined


_WITHOUT_CALL = """
import errno, sys, pyseccomp
filter = pyseccomp.SyscallFilter(defaction=pyseccomp.ALLOW)
filter.add_rule(pyseccomp.ERRNO(errno.{error}), {call!r})
filter.load()
from kuberoll_workers.environments.programs import Program, ProgramRunner, ConfinementUnavailable
ran = "nothing"
try:
    with ProgramRunner(parallel=1) as runner:
        ran = runner.run(Program.python("print('it ran')"))
except ConfinementUnavailable as error:
    print(error)
print(ran)
"""


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ("landlock_create_ruleset", "ENOSYS", "Landlock must be version 3 (Linux 6.2) or later; found: none"),
        ("landlock_restrict_self", "EPERM", "Landlock refused its rules"),
        ("seccomp", "EPERM", "the kernel refused the seccomp filter ("),
    ],
)
def test_without_a_layer_nothing_runs_and_the_error_says_so(call: str, error: str, message: str) -> None:
    # As under a seccomp profile that forbids a call, or on a kernel that does not have it.
    source = _WITHOUT_CALL.format(call=call, error=error)
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
    )
    *_, said, ran = done.stdout.splitlines()
    assert message in said
    assert ran == "nothing"


def test_a_second_listener_around_it_is_an_error() -> None:
    # A confined program cannot confine others; only one seccomp listener is possible.
    source = (
        "import os, sys\nsys.path[:0] = sys.argv[1:]\n"
        "from kuberoll_workers.environments.programs import *\n"
        "try: ProgramRunner(parallel=1).check()\nexcept (ConfinementUnavailable, OSError) as e: print(type(e).__name__)\n"
    )
    with ProgramRunner(parallel=1) as runner:
        outcome = runner.run(Program.python(source))
    assert outcome.kind == "error"
    assert outcome.stdout == ""


# ---- scratch directories


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("dflm"), st.integers(0, 4)), max_size=30))
def test_whatever_is_left_is_removed(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]) -> None:
    root = tmp_path_factory.mktemp("scratch") / "root"
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    root.mkdir()
    folders, links = [root], []
    for number, (kind, place) in enumerate(steps):
        path = folders[place % len(folders)] / str(number)
        if kind == "d":
            path.mkdir()
            folders.append(path)
        elif kind == "f":
            path.write_bytes(b"x" * 5000)
        elif kind == "l":
            path.symlink_to(elsewhere)
            links.append(path)
        else:
            path.mkdir()
            path.chmod(0)
    assert scratch.size(str(root), 1000) >= 4096 * sum(kind == "f" for kind, _ in steps)
    scratch.remove(str(root))
    assert not root.exists()
    assert (elsewhere / "kept").exists()


@pytest.mark.slow
def test_a_directory_of_any_depth_is_removed(tmp_path: Path) -> None:
    before = Path.cwd()
    try:
        root = tmp_path / "root"
        root.mkdir()
        os.chdir(root)
        for _ in range(3000):
            Path("deep").mkdir()
            os.chdir("deep")
    finally:
        os.chdir(before)
    with pytest.raises(scratch.Full):
        scratch.size(str(root), 100_000)
    scratch.remove(str(root))
    assert not root.exists()


def test_an_outcome_is_plain_data() -> None:
    outcome = Outcome(kind="ok", exit_code=0, stdout="out", stderr="err", wall_seconds=1.0, cpu_seconds=0.5)
    assert (
        Outcome.from_json(
            b'{"kind":"ok","exit_code":0,"stdout":"out","stderr":"err","wall_seconds":1.0,"cpu_seconds":0.5}'
        )
        == outcome
    )
    with pytest.raises(ConfinementUnavailable, match="why"):
        Outcome.from_json(b'{"unavailable":"why"}')


def test_the_released_name_of_the_error_still_catches_it() -> None:
    with pytest.raises(SandboxUnavailable, match="why"):
        Outcome.from_json(b'{"unavailable":"why"}')
