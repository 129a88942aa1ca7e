"""Grading of a program: runs it, confined, with its tests."""

from __future__ import annotations

import functools
import importlib.resources
import json
import sys
from dataclasses import dataclass, replace

from kuberoll_workers.environments.builtin.code.comparison import same_output
from kuberoll_workers.environments.builtin.code.formats import CallTests, OutputTests, PythonTests, Tests
from kuberoll_workers.environments.programs import Limits, Outcome, Program, ProgramRunner

_LIMIT = {
    "wall_time": "exceeded the time limit",
    "cpu_time": "exceeded the time limit",
    "memory": "exceeded the memory limit",
    "output": "printed too much",
    "disk": "wrote too much",
}
# For the process with the tests, beside the program's own.
_CHECKER_PROCESSES = 2


class UnusableTests(Exception):
    """The tests cannot be used, whatever the program is."""


@dataclass(frozen=True, slots=True)
class Grade:
    """Result of a program's tests.

    Attributes:
        passed: Tests that it passed.
        tests: All tests; those after the first that failed may not have been run.
        failure: What was wrong with the first that failed; None if all passed.
    """

    passed: int
    tests: int
    failure: str | None


def grade(
    code: str, setup: str, tests: Tests, *, runner: ProgramRunner, limits: Limits, all_tests: bool, tolerance: float
) -> Grade:
    """Grade a program.

    The expected results never enter the process that runs the program: outputs are compared here, and calls are made by
    another confined process, which has the tests.

    Args:
        limits: Of one run: of one input, or of all tests of a function.
        all_tests: False to stop at the first test that fails.

    Raises:
        UnusableTests: The tests are at fault.
        ConfinementUnavailable, ProgramFailed: See `ProgramRunner.run`.
    """
    if isinstance(tests, OutputTests):
        return _grade_outputs(f"{setup}\n{code}" if setup else code, tests, runner, limits, all_tests, tolerance)
    return _grade_calls(code, setup, tests, runner, limits, all_tests, tolerance)


def _grade_outputs(
    code: str, tests: OutputTests, runner: ProgramRunner, limits: Limits, all_tests: bool, tolerance: float
) -> Grade:
    passed, failure = 0, None
    for given, wanted in tests.cases:
        # What a right answer is long, and no more.
        most = max(limits.output, 2 * len(wanted.encode()))
        program = Program.python(code, stdin=given.encode(), limits=replace(limits, output=most))
        outcome = runner.run(program)
        wrong = _failure_of(outcome)
        if wrong is None and not same_output(outcome.stdout, wanted, tolerance=tolerance):
            wrong = "wrong answer"
        passed += wrong is None
        failure = failure or wrong
        if failure is not None and not all_tests:
            break
    return Grade(passed, len(tests.cases), failure)


def _grade_calls(
    code: str,
    setup: str,
    tests: CallTests | PythonTests,
    runner: ProgramRunner,
    limits: Limits,
    all_tests: bool,
    tolerance: float,
) -> Grade:
    request = {
        "code": code,
        "setup": setup,
        "cases": tests.cases if isinstance(tests, CallTests) else None,
        "function": tests.function if isinstance(tests, CallTests) else None,
        "wrapped": isinstance(tests, CallTests) and tests.wrapped,
        "tests": tests.tests if isinstance(tests, PythonTests) else None,
        "entry_point": tests.entry_point if isinstance(tests, PythonTests) else None,
        "stop": not all_tests,
        "tolerance": tolerance,
    }
    count = len(tests.cases if isinstance(tests, CallTests) else tests.tests)
    program = Program(
        # Nothing is imported from the scratch directory, where the code may write.
        argv=[sys.executable, "-P", "-s", "-B", "checker.py"],
        stdin=json.dumps(request).encode(),
        files={"checker.py": _harness("checker"), "solution.py": _harness("solution")},
        limits=replace(limits, processes=limits.processes + _CHECKER_PROCESSES, output=1 << 16 | 512 * count),
    )
    outcome = runner.run(program)
    verdicts = _verdicts(outcome.stdout)
    for verdict in verdicts:
        if isinstance(verdict, dict) and "unusable" in verdict:
            raise UnusableTests(str(verdict["unusable"]))
    passed = sum(verdict is True for verdict in verdicts)
    failure = next((str(item["failure"]) for item in verdicts if isinstance(item, dict)), None)
    if failure is None and passed < count:
        failure = _failure_of(outcome) or "the tests did not end"
    return Grade(passed, count, failure)


def _verdicts(text: str) -> list[object]:
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            # The process was killed in the middle of it.
            break
    return found


def _failure_of(outcome: Outcome) -> str | None:
    if outcome.kind == "ok":
        return None
    if outcome.kind != "error":
        return _LIMIT[outcome.kind]
    lines = outcome.stderr.strip().splitlines()
    return lines[-1][:300] if lines else f"ended with exit code {outcome.exit_code}"


@functools.cache
def _harness(name: str) -> bytes:
    folder = importlib.resources.files("kuberoll_workers.environments.builtin.code.harness")
    return b"\n\n".join((folder / f"{part}.py").read_bytes() for part in ("values", name))
