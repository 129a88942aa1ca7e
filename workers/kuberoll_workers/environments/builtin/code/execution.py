"""Code execution: one program, graded by tests that run confined."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from kuberoll_workers.environments.builtin.code.extraction import program_of
from kuberoll_workers.environments.builtin.code.formats import setup_of, tests_of
from kuberoll_workers.environments.builtin.code.grading import Grade, UnusableTests, grade
from kuberoll_workers.environments.builtin.code.tasks import generated_rows
from kuberoll_workers.environments.builtin.code.trials import attacks_on, solutions_of
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.turn import Reply, Turn, batch_of, reply_of
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    EnvironmentReturn,
    Episode,
    Metadata,
    ScoringCase,
    UnusableRow,
)
from kuberoll_workers.environments.programs import ConfinementUnavailable, Limits, ProgramRunner
from kuberoll_workers.environments.registry import UnusableEnvironment

MIB = 1 << 20


class CodeExecutionConfig(EnvironmentConfig):
    """Limits of programs, and what is a reward."""

    reward: Literal["All", "Fraction"] = Field(
        default="All",
        description="All: 1 if all tests pass, else 0; the first that fails ends them. Fraction: the share that pass.",
    )
    cpu_seconds: float = Field(
        default=5, ge=0.1, le=3600, description="CPU time of one run: of one input, or of all tests of a function."
    )
    wall_seconds: float | None = Field(
        default=None,
        ge=0.1,
        le=36000,
        description="Elapsed time of one run; absent: 10 seconds and twice cpuSeconds, because time on a busy "
        "machine is not the program's fault.",
    )
    memory_mi_b: int = Field(
        default=512, alias="memoryMiB", ge=64, le=1 << 20, description="Memory of one run, in MiB."
    )
    processes: int = Field(default=16, ge=1, le=1024, description="Processes and threads of one run.")
    max_tests: int = Field(default=1000, ge=1, le=100_000, description="Tests of a row that are run: its first ones.")
    parallel: int | None = Field(
        default=None, ge=1, le=1024, description="Responses that are graded at a time; absent: one on each processor."
    )
    tolerance: float = Field(
        default=1e-6,
        ge=0,
        le=1,
        description="Absolute or relative error of a number, where the expected one has a decimal point.",
    )
    max_characters: int = Field(
        default=100_000, ge=16, le=1_000_000, description="Length of a program; a longer one gets 0."
    )


class CodeExecutionEnvironment(EnvironmentInterface):
    """Single turn: the response's program is run with the tests of its row; the episode ends.

    `metadata.tests` has the tests. The process that runs the program never sees what it should result in, so it cannot
    print, exit or patch its way to a reward. A program that fails, hangs or exceeds a limit gets 0, or its share; a
    confinement that does not work is a failure of the environment, and tests that cannot be used are one of the row.
    """

    row_metadata: ClassVar[Mapping[str, str]] = {
        "tests": "inputs and outputs of a function or program, or assertions",
        "solution": "for kuberoll certify, a right program, or a list of them",
    }
    scoring_cases: ClassVar[Sequence[ScoringCase]] = [
        ScoringCase(
            row={"metadata": {"tests": {"fn_name": "double", "inputs": [[2], [5]], "outputs": [4, 10]}}},
            responses=[f"```python\n{code}\n```"],
            reward=reward,
        )
        for code, reward in [
            ("def double(x):\n    return 2 * x", 1.0),
            ("def double(x):\n    return x", 0.0),
            ("import sys\nsys.exit(0)", 0.0),
            ("class Any:\n    def __eq__(self, other):\n        return True\ndef double(x):\n    return Any()", 0.0),
            ("def double(x:", 0.0),
        ]
    ]

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid, or programs cannot be confined here.
        """
        self._config = parse_config(CodeExecutionConfig, config)
        self._limits = Limits(
            cpu_seconds=self._config.cpu_seconds,
            wall_seconds=self._config.wall_seconds or 10 + 2 * self._config.cpu_seconds,
            memory=self._config.memory_mi_b * MIB,
            processes=self._config.processes,
        )
        self._runner = ProgramRunner(parallel=self._config.parallel)
        self._threads = concurrent.futures.ThreadPoolExecutor(self._runner.parallel, "kuberoll-programs")
        self.parallel_steps = self._runner.parallel
        if sys.platform == "linux":
            # Found out before the engine starts. Elsewhere only the metrics of a run can be computed.
            try:
                self._runner.check()
            except ConfinementUnavailable as error:
                raise UnusableEnvironment(str(error)) from error

    async def step(  # type: ignore[override]
        self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]
    ) -> EnvironmentReturn:
        """Grade each response, several at a time.

        Raises:
            UnusableRow: A row has no tests, or tests that cannot be used.
            UnusableEnvironment: Programs cannot be confined here.
            ProgramFailed: The confinement does not work.
        """
        states = [state or {} for state in metadata]
        replies = [reply_of(log) for log in message_log_batch]
        # All rows are read before anything runs.
        prepared = [(tests_of(state), setup_of(state)) for state in states]
        loop = asyncio.get_running_loop()
        try:
            turns = (
                loop.run_in_executor(self._threads, self._turn, *given)
                for given in zip(replies, states, prepared, strict=True)
            )
            return batch_of(await asyncio.gather(*turns))
        except ConfinementUnavailable as error:
            raise UnusableEnvironment(str(error)) from error

    def check_row(self, metadata: Metadata) -> None:
        """See `EnvironmentInterface.check_row`."""
        tests_of(metadata or {})
        setup_of(metadata or {})

    def solution(self, episode: Episode) -> dict[str, list[str]] | None:
        """The row's solutions, in the fields that known datasets have."""
        texts = solutions_of(episode.metadata or {})
        if len(texts) == 1:
            return {"solution": texts}
        return {f"solution {number}": [text] for number, text in enumerate(texts, start=1)} or None

    def attacks(self, episode: Episode) -> dict[str, list[str]]:
        """Programs that exit, print, patch and redefine instead of doing what is asked for."""
        state = episode.metadata or {}
        return attacks_on(tests_of(state), setup_of(state))

    def _turn(self, reply: Reply, state: dict[str, Any], prepared: Any) -> Turn:
        tests, setup = prepared
        code = program_of(reply, truncated=reply.truncated)
        if code is None or len(code) > self._config.max_characters:
            result = Grade(0, 1, "no program" if code is None else "the program is too long")
        else:
            try:
                result = grade(
                    code,
                    setup,
                    tests.limited(self._config.max_tests),
                    runner=self._runner,
                    limits=self._limits,
                    all_tests=self._config.reward == "Fraction",
                    tolerance=self._config.tolerance,
                )
            except UnusableTests as error:
                row = f"row {state['idx']!r}: " if "idx" in state else ""
                raise UnusableRow(f"{row}metadata.tests: {error}") from error
        correct = result.failure is None
        share = result.passed / result.tests
        return Turn(
            observation="\nCorrect.\n" if correct else "\nWrong.\n",
            metadata={**state, "correct": correct, "tests_passed": result.passed, **_failure(result)},
            reward=float(correct) if self._config.reward == "All" else share,
            terminated=True,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `accuracy`, and how often programs failed without a wrong answer."""
        states = [state or {} for state in batch["extra_env_info"]]
        if not states:
            return batch, {"episodes": 0}
        failures = [state.get("test_failure") for state in states]
        return batch, {
            "episodes": len(states),
            "accuracy": sum(bool(state.get("correct")) for state in states) / len(states),
            "no_program_rate": sum(failure == "no program" for failure in failures) / len(states),
            "time_limit_rate": sum(failure == "exceeded the time limit" for failure in failures) / len(states),
        }

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with small tasks: functions on lists of numbers, with their tests."""
        return generated_rows(count, seed)

    def shutdown(self) -> None:
        """End the launcher of programs."""
        self._runner.close()
        self._threads.shutdown(wait=False)


def _failure(result: Grade) -> dict[str, Any]:
    return {} if result.failure is None else {"test_failure": result.failure}
