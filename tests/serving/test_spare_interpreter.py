"""The interpreter that imports beforehand, under the real `multiprocessing`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kuberoll_workers.serving.engines.spare_interpreter import SpareInterpreter
from tests.serving import spawned

SPAWN = multiprocessing.get_context("spawn")
PATIENCE_SECONDS = 240


def test_the_next_process_is_the_one_that_has_imported_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEROLL_TEST", "before")
    monkeypatch.setenv("KUBEROLL_TEST_REMOVED", "x")
    spare = SpareInterpreter([spawned.UNUSUAL])
    monkeypatch.setenv("KUBEROLL_TEST", "at its start")
    monkeypatch.delenv("KUBEROLL_TEST_REMOVED")
    monkeypatch.chdir(tmp_path)
    big = "x" * 1_000_000
    with spare.used():
        first = SPAWN.Process(target=spawned.report, args=(str(tmp_path / "1"), big))
        second = SPAWN.Process(target=spawned.report, args=(str(tmp_path / "2"),))
        first.start()
        second.start()
    for process in (first, second):
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0
    assert first.pid == spare.pid != second.pid
    assert (tmp_path / "1").read_text() == f"{spare.pid} True at its start {tmp_path} {big}"
    assert (tmp_path / "2").read_text() == f"{second.pid} False at its start {tmp_path} "


def test_it_can_be_named_whatever_becomes_of_its_first_variable() -> None:
    code = (
        "import multiprocessing, os\n"
        "from kuberoll_workers.serving.engines.spare_interpreter import SpareInterpreter\n"
        "from tests.serving import spawned\n"
        "spare = SpareInterpreter(['json'])\n"
        "os.environ['FIRST'] = 'another value'\n"
        "with spare.used():\n"
        "    process = multiprocessing.get_context('spawn').Process(target=spawned.name, args=('VLLM::Named',))\n"
        "    process.start()\n"
        "process.join()\n"
        "assert process.pid == spare.pid\n"
    )
    variables = {"FIRST": "a value", **os.environ, "SPT_NOENV": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (done.returncode, done.stdout) == (0, "VLLM::Named\n"), done.stderr


def test_its_exit_code_and_a_signal_that_kills_it_are_known() -> None:
    for code in (0, 7):
        with SpareInterpreter(["json"]).used():
            process = SPAWN.Process(target=spawned.end, args=(code,))
            process.start()
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == code
    spare = SpareInterpreter(["json"])
    with spare.used():
        process = SPAWN.Process(target=spawned.wait)
        process.start()
    process.kill()
    process.join(PATIENCE_SECONDS)
    assert process.pid == spare.pid
    assert int(process.exitcode or 0) == -signal.SIGKILL


def test_one_that_is_not_used_is_ended() -> None:
    spare = SpareInterpreter(["json"])
    with spare.used():
        assert psutil.pid_exists(spare.pid)
    assert not psutil.pid_exists(spare.pid)


def test_processes_are_spawned_as_usual_afterwards() -> None:
    before = multiprocessing.context.SpawnProcess.__dict__["_Popen"]
    with SpareInterpreter(["json"]).used():
        assert multiprocessing.context.SpawnProcess.__dict__["_Popen"] is not before
    assert multiprocessing.context.SpawnProcess.__dict__["_Popen"] is before


def test_one_that_has_died_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    spare = SpareInterpreter(["json"])
    os.kill(spare.pid, signal.SIGKILL)
    # Wait for its end, and leave its exit code.
    os.waitid(os.P_PID, spare.pid, os.WEXITED | os.WNOWAIT)
    with spare.used():
        process = SPAWN.Process(target=spawned.report, args=(str(tmp_path / "1"),))
        process.start()
        process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0
    assert process.pid != spare.pid


def test_a_process_that_inherits_file_descriptors_gets_a_new_interpreter() -> None:
    receiver, sender = SPAWN.Pipe(duplex=False)
    spare = SpareInterpreter(["json"])
    with receiver, sender, spare.used():
        process = SPAWN.Process(target=spawned.send, args=(sender,))
        process.start()
        assert receiver.poll(PATIENCE_SECONDS)
        assert receiver.recv() == process.pid != spare.pid
        process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0


def test_a_module_that_cannot_be_imported_is_the_work_s_concern(tmp_path: Path) -> None:
    spare = SpareInterpreter(["no.such.module", spawned.UNUSUAL])
    with spare.used():
        process = SPAWN.Process(target=spawned.report, args=(str(tmp_path / "1"),))
        process.start()
    process.join(PATIENCE_SECONDS)
    assert (process.pid, process.exitcode) == (spare.pid, 0)
    assert (tmp_path / "1").read_text().startswith(f"{spare.pid} True ")


@pytest.mark.slow
def test_it_ends_with_its_parent() -> None:
    program = (
        "import os\n"
        "from kuberoll_workers.serving.engines.spare_interpreter import SpareInterpreter\n"
        "print(SpareInterpreter(['json']).pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    assert parent.returncode == -signal.SIGKILL
    try:
        spare = psutil.Process(int(parent.stdout))
    except psutil.NoSuchProcess:
        return
    spare.wait(PATIENCE_SECONDS)


@pytest.mark.slow
def test_a_number_of_threads_that_is_set_later_is_pytorch_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with SpareInterpreter(["torch"]).used():
        # As vLLM sets it around the start of its engine.
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        process = SPAWN.Process(target=spawned.report_threads, args=(str(tmp_path / "1"),))
        process.start()
    process.join(PATIENCE_SECONDS)
    assert (tmp_path / "1").read_text() == "1"
