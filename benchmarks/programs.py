"""Confined programs: programs a second of CPU time, against bare subprocesses.

CPU time is of everything: this process, the launcher, supervisors and programs. Elapsed time of a shared machine says
little.

    python -m benchmarks.programs [--count 100]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kuberoll_workers.environments import process_tree
from kuberoll_workers.environments.builtin.code.execution import CodeExecutionEnvironment
from kuberoll_workers.environments.builtin.code.tasks import solution_of
from kuberoll_workers.environments.programs import Limits, Program, ProgramRunner

_EMPTY = "pass\n"
_WORK = "print(sum(i * i for i in range(200_000)))\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    count = parser.parse_args().count
    print(f"{len(os.sched_getaffinity(0))} processors, {count} runs of each")
    with tempfile.TemporaryDirectory() as folder, ProgramRunner(parallel=1) as runner:
        runner.check()
        assert runner._launcher is not None
        launcher = runner._launcher.pid
        for name, source in (("an empty program of Python", _EMPTY), ("one of some 15 ms", _WORK)):
            path = Path(folder, "main.py")
            path.write_text(source)
            program = Program.python(source)
            argv = [sys.executable, "-s", "-B", str(path)]
            bare = _measure(count, lambda argv=argv: subprocess.run(argv, capture_output=True, check=True))
            ours = _measure(count, lambda program=program: runner.run(program), launcher)
            _show(name, count, bare, ours)
        true = Program(argv=["/bin/true"], limits=Limits())
        bare = _measure(count, lambda: subprocess.run(["/bin/true"], capture_output=True, check=True))
        _show("/bin/true", count, bare, _measure(count, lambda: runner.run(true), launcher))
    environment = CodeExecutionEnvironment({})
    assert environment._runner._launcher is not None
    rows = environment.generate_dataset(count, 0)
    states = [row["metadata"] for row in rows]
    texts = [f"```python\n{solution_of(state['task'], state['number'])}```" for state in states]
    logs = [[{"role": "assistant", "content": text}] for text in texts]
    launcher, began = environment._runner._launcher.pid, time.perf_counter()
    cpu = _measure(1, lambda: asyncio.run(environment.step(logs, list(states))), launcher)
    elapsed = (time.perf_counter() - began) / 2
    environment.shutdown()
    print(
        f"{'responses graded with 5 tests of a function':45} {1000 * cpu / count:7.1f} ms CPU each, "
        f"{count / cpu:6.1f} a second and core; {count / elapsed:.1f} a second here"
    )


def _measure(count: int, run: Callable[[], object], launcher: int | None = None) -> float:
    """CPU seconds of some runs, after a first one."""
    run()
    before = _cpu(launcher)
    for _ in range(count):
        run()
    # A supervisor that has answered ends within a moment, and is counted then.
    time.sleep(0.1)
    return _cpu(launcher) - before


def _cpu(launcher: int | None) -> float:
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    # What the launcher has used, with all supervisors that have ended, and their programs.
    return sum(used.ru_utime + used.ru_stime for used in (own, ended)) + (
        process_tree.cpu_seconds(launcher) if launcher else 0
    )


def _show(name: str, count: int, bare: float, ours: float) -> None:
    print(
        f"{name:45} {1000 * ours / count:7.1f} ms CPU each, {count / ours:6.1f} a second and core; "
        f"bare {1000 * bare / count:.1f} ms"
    )


if __name__ == "__main__":
    main()
