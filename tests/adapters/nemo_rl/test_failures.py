"""What goes wrong with one sample is that sample's, is told, and is never a reward of 0."""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from kuberoll_workers.adapters.nemo_rl import (
    RolloutFailed,
    RolloutLimits,
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
    run_sample_multi_turn_rollout,
)
from kuberoll_workers.environments import EnvironmentReturn, UnusableRow
from kuberoll_workers.rollouts.failures import TrajectoryFailed
from tests.adapters.nemo_rl.fakes import FAST, CharacterTokenizer, CountingEnvironment, FakePolicy, batch_of, contents

FACES = pytest.mark.parametrize("run", [run_multi_turn_rollout, run_async_multi_turn_rollout])


def three() -> Any:
    """The second sample is the one that goes wrong."""
    return batch_of(*[{"turns": 2, "bad": row == 1} for row in range(3)])


def roll(run: Any, policy: Any = None, environment: Any = None, **more: Any) -> Any:
    environments = {"env": environment or CountingEnvironment()}
    more = {"limits": FAST, **more}
    return run(policy or FakePolicy(), three(), CharacterTokenizer(), environments, 1000, **more)


def the_failure(final: Any) -> Any:
    """The one failure of a batch whose other samples are as they should be."""
    assert final["stop_reason"] == ["terminated", "failed", "terminated"]
    assert final["total_reward"][[0, 2]].tolist() == [2.0, 2.0]
    assert math.isnan(final["total_reward"][1])
    assert final["loss_multiplier"].tolist() == [1.0, 0.0, 1.0]
    assert final["truncated"].tolist() == [False, False, False]
    assert [failure is None for failure in final["failure"]] == [True, False, True]
    return final["failure"][1]


class Faulty(CountingEnvironment):
    """Does something else where the episode's metadata says `bad`."""

    def __init__(self, fault: Any) -> None:
        super().__init__()
        self._fault = fault
        self.release = threading.Event()

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> Any:
        returned = super().step(message_log_batch, metadata)
        bad = [row for row, state in enumerate(metadata) if state["bad"]]
        if not bad:
            return returned
        if isinstance(self._fault, Exception):
            raise self._fault
        return self._fault(self, returned, bad[0])


def hang(environment: Faulty, returned: Any, row: int) -> Any:
    environment.release.wait()


def nan(environment: Faulty, returned: Any, row: int) -> Any:
    rewards = returned.rewards.clone()
    rewards[row] = math.nan
    return returned._replace(rewards=rewards)


FAULTS = [
    (ValueError("cannot judge this"), "step raised ValueError: cannot judge this"),
    (hang, "longer than stepTimeoutSeconds"),
    (lambda env, returned, row: returned._replace(rewards=returned.rewards[:-1]), "rewards has 0 elements for 1"),
    (nan, "rewards[0] is nan; a reward must be finite"),
    (lambda env, returned, row: None, "step returned NoneType"),
    (lambda env, returned, row: returned[:4], "step returned tuple"),
    (lambda env, returned, row: returned._replace(rewards=["one"] * len(returned.rewards)), "must be a number"),
    (lambda env, returned, row: returned._replace(observations=["hi"] * len(returned.rewards)), "observations[0]"),
    (lambda env, returned, row: returned._replace(terminateds=[None] * len(returned.rewards)), "terminateds[0]"),
    (lambda env, returned, row: returned._replace(metadata=["s"] * len(returned.rewards)), "metadata[0]"),
]


@pytest.mark.slow
@FACES
@pytest.mark.parametrize(("fault", "cause"), FAULTS)
def test_environment_faults(run: Any, fault: Any, cause: str, caplog: pytest.LogCaptureFixture) -> None:
    environment = Faulty(fault)
    limits = RolloutLimits(step_seconds=1.5 if fault is hang else 60.0, backoff_seconds=0.0)
    with caplog.at_level(logging.ERROR, "kuberoll_workers.adapters.nemo_rl.rollout"):
        try:
            final, metrics = roll(run, environment=environment, limits=limits)
        finally:
            environment.release.set()
    failure = the_failure(final)
    assert cause in failure.cause
    assert (failure.stage, failure.tries, failure.task_index) == ("environment", 2, 1)
    # What it had until then is there.
    assert contents(final["message_log"][1])[-1] == ("assistant", "x")
    assert (metrics["failed_samples"], metrics["mean_total_reward"]) == (1, 2.0)
    rates = ("natural_termination_rate", "truncation_rate", "max_turns_reached_rate", "failed_rate")
    assert sum(metrics[name] for name in rates) == pytest.approx(1.0)
    record, *tracebacks = (record.getMessage() for record in caplog.records)
    summary = f"1 of 3 samples failed; the first, sample 1, in turn 1 (environment, {failure.kind}): {failure.cause}"
    if isinstance(fault, Exception):
        assert re.fullmatch(re.escape(summary) + r" \(.*test_failures\.py:\d+ in step\)", record)
        assert [text.splitlines()[0] for text in tracebacks] == ["1 of them, the first in sample 1:"]
        assert "raise self._fault" in tracebacks[0]
    elif fault is hang:
        assert re.fullmatch(re.escape(summary) + r" \(.*test_failures\.py:\d+ in hang\)", record)
        assert "Stack (most recent call last)" in tracebacks[0]
    else:
        assert (record, tracebacks) == (summary, [])


@FACES
def test_a_row_that_cannot_be_used_is_a_failure(run: Any) -> None:
    final, _ = roll(run, environment=Faulty(UnusableRow("metadata.answer is missing")))
    assert the_failure(final).cause == "metadata.answer is missing"


@FACES
def test_an_environment_fault_that_passes_is_no_failure(run: Any) -> None:
    class Flaky(CountingEnvironment):
        def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            returned = super().step(message_log_batch, metadata)
            if len(self.batches) == 1:
                raise OSError("gone for a moment")
            return returned

    final, metrics = roll(run, environment=Flaky())
    assert final["stop_reason"] == ["terminated"] * 3
    assert metrics["failed_rate"] == 0.0


def _of_the_second(change: Any) -> Any:
    """Change what the policy answers to the second prompt."""

    def changed(output: dict[str, Any]) -> dict[str, Any]:
        rows = [
            row for row, ids in enumerate(output["output_ids"].tolist()) if "".join(map(chr, ids[:8])) == "prompt 1"
        ]
        return {name: change(name, column, rows[0]) for name, column in output.items()} if rows else output

    return changed


def _nan_logprob(name: str, column: torch.Tensor, row: int) -> torch.Tensor:
    if name == "logprobs":
        column[row, 8] = math.nan
    return column


def _too_long(name: str, column: torch.Tensor, row: int) -> torch.Tensor:
    if name == "unpadded_sequence_lengths":
        column[row] += 99
    return column


def _other_prompt(name: str, column: torch.Tensor, row: int) -> torch.Tensor:
    if name == "output_ids":
        column[row, 0] += 1
    return column


@FACES
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (_nan_logprob, "a log-probability that is not a finite number"),
        (_too_long, "108 count, for a prompt of 8"),
        (_other_prompt, "does not begin with the prompt"),
    ],
)
def test_impossible_responses(run: Any, change: Any, cause: str) -> None:
    final, _ = roll(run, FakePolicy(change=_of_the_second(change)))
    failure = the_failure(final)
    assert cause in failure.cause
    assert (failure.kind, failure.stage, failure.tries) == ("infrastructure", "generation", 3)
    assert [role for role, _ in contents(final["message_log"][1])] == ["user"]


@FACES
def test_short_logprobs_fail_whom_they_are_short_for(run: Any) -> None:
    def short(output: dict[str, Any]) -> dict[str, Any]:
        return {**output, "logprobs": output["logprobs"][:, :9]}

    # The second response is two tokens long, the others are one.
    policy = FakePolicy(lambda prompt, stops: "xy" if prompt == "prompt 1" else "x", change=short)
    batch = batch_of(*[{"turns": 1}] * 3)
    final, _ = run(policy, batch, CharacterTokenizer(), {"env": CountingEnvironment()}, 1000, limits=FAST)
    assert final["stop_reason"] == ["terminated", "failed", "terminated"]
    assert "2 token ids but 1 logprobs" in final["failure"][1].cause


@FACES
@pytest.mark.parametrize(
    ("output", "kind", "tries", "cause"),
    [
        ({}, "infrastructure", 3, "no output_ids"),
        (None, "infrastructure", 1, "the policy raised TypeError: the policy's output is a NoneType"),
    ],
)
def test_no_output(run: Any, output: Any, kind: str, tries: int, cause: str) -> None:
    final, _ = roll(run, FakePolicy(change=lambda _: output))
    assert final["stop_reason"] == ["failed"] * 3
    for failure in final["failure"]:
        assert cause in failure.cause
        assert (failure.kind, failure.tries) == (kind, tries)


@pytest.mark.parametrize("numbers", [(), (1,), (0, 0)])
def test_generate_async_that_answers_nothing_or_something_else(numbers: tuple[int, ...]) -> None:
    class Partial(FakePolicy):
        async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
            for number in numbers:
                yield number, self._output(data)

    final, _ = roll(run_async_multi_turn_rollout, Partial())
    assert final["stop_reason"] == ["failed"] * 3
    assert {failure.kind for failure in final["failure"]} == {"infrastructure"}


def test_generate_that_answers_too_few() -> None:
    policy = FakePolicy(change=lambda output: {name: column[:1] for name, column in output.items()})
    final, _ = roll(run_multi_turn_rollout, policy, limits=RolloutLimits(generation_attempts=1))
    assert final["stop_reason"] == ["failed"] * 3
    assert {failure.cause for failure in final["failure"]} == {"the policy answered 1 of 3 prompts"}


@FACES
@pytest.mark.parametrize(
    ("error", "kind", "tries"),
    [
        (RuntimeError("engine is dead"), "infrastructure", 3),
        (OSError("connection reset"), "infrastructure", 3),
        (ValueError("prompt 1 is too long"), "data", 1),
        (TypeError("not a batch"), "infrastructure", 1),
        (KeyError("input_ids"), "infrastructure", 1),
        (NotImplementedError("no"), "infrastructure", 1),
    ],
)
def test_policy_errors(run: Any, error: Exception, kind: str, tries: int) -> None:
    policy = FakePolicy(lambda prompt, stops: error)
    final, _ = roll(run, policy)
    assert final["stop_reason"] == ["failed"] * 3
    for failure in final["failure"]:
        assert (failure.kind, failure.stage, failure.tries) == (kind, "generation", tries)
        assert failure.cause == f"the policy raised {type(error).__name__}: {error}"
        assert failure.idx == 100 + failure.task_index


@FACES
def test_a_prompt_that_the_policy_refuses_fails_alone(run: Any) -> None:
    policy = FakePolicy(lambda prompt, stops: ValueError("too long") if prompt == "prompt 1" else "x")
    failure = the_failure(roll(run, policy)[0])
    assert (failure.kind, failure.tries, failure.cause) == ("data", 1, "the policy raised ValueError: too long")


@FACES
def test_a_generation_error_that_passes_is_no_failure(run: Any) -> None:
    errors = iter([RuntimeError("gone for a moment")])
    policy = FakePolicy(lambda prompt, stops: next(errors, "x"))
    final, _ = roll(run, policy)
    assert final["stop_reason"] == ["terminated"] * 3


@FACES
def test_a_failure_after_some_turns_keeps_them_and_has_no_reward(run: Any) -> None:
    policy = FakePolicy(lambda prompt, stops: ValueError("too long") if prompt == "prompt 1xobs" else "x")
    final, metrics = roll(run, policy)
    failure = the_failure(final)
    assert failure.turn_count == 1
    assert [role for role, _ in contents(final["message_log"][1])] == ["user", "assistant", "environment"]
    assert final["extra_env_info"][1] == {"turns": 2, "bad": True}
    assert metrics["min_total_reward"] == 2.0


def test_a_synchronous_policy_that_hangs_ends_the_call() -> None:
    release = threading.Event()

    def answer(prompt: str, stops: Any) -> str:
        release.wait()
        return "x"

    try:
        limits = RolloutLimits(generation_seconds=0.1, generation_attempts=2, backoff_seconds=0.0)
        final, _ = roll(run_multi_turn_rollout, FakePolicy(answer), limits=limits)
    finally:
        release.set()
    assert final["stop_reason"] == ["failed"] * 3
    assert "no response within" in final["failure"][0].cause


@pytest.mark.slow
def test_an_asynchronous_policy_that_hangs_is_cancelled() -> None:
    cancelled: list[str] = []

    class Hanging(FakePolicy):
        async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
            try:
                if self._prompts(data) == ["prompt 1"]:
                    await asyncio.Event().wait()
            finally:
                cancelled.extend(self._prompts(data))
            yield 0, self._output(data)

    limits = RolloutLimits(generation_seconds=1.5, generation_attempts=2, backoff_seconds=0.0)
    the_failure(roll(run_async_multi_turn_rollout, Hanging(), limits=limits)[0])
    assert cancelled.count("prompt 1") == 2


@pytest.mark.slow
@FACES
def test_trajectory_deadline(run: Any) -> None:
    environment = Faulty(hang)
    try:
        final, _ = roll(run, environment=environment, limits=RolloutLimits(trajectory_seconds=2))
    finally:
        environment.release.set()
    # In lockstep all were in the call that hung.
    assert final["stop_reason"][1] == "failed"
    assert "trajectorySeconds (2 s)" in final["failure"][1].cause


@FACES
def test_raised_when_all_others_have_ended(run: Any) -> None:
    with pytest.raises(RolloutFailed, match="1 of 3 samples failed; the first, sample 1, in turn 1") as caught:
        roll(run, environment=Faulty(ValueError("as told")), on_failure="raise")
    error = caught.value
    failure = the_failure(error.batch)
    assert error.failures == [failure]
    assert error.metrics["failed_rate"] == pytest.approx(1 / 3)
    loaded = pickle.loads(pickle.dumps(error))
    assert (type(loaded), str(loaded), loaded.failures) == (RolloutFailed, str(error), error.failures)


@FACES
def test_nothing_is_raised_or_logged_when_all_is_well(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    final, _ = roll(run, on_failure="raise")
    assert final["failure"] == [None] * 3
    assert not caplog.records


@FACES
@pytest.mark.parametrize("column", [None, [1.0, 1.0, 1.0], torch.ones(3, dtype=torch.int64)])
def test_loss_multipliers_of_any_kind(run: Any, column: Any) -> None:
    batch = three()
    del batch["loss_multiplier"]
    if column is not None:
        batch["loss_multiplier"] = column
    environments = {"env": Faulty(ValueError("as told"))}
    final, _ = run(FakePolicy(), batch, CharacterTokenizer(), environments, 1000, limits=FAST)
    if column is None:
        assert "loss_multiplier" not in final
    else:
        assert list(final["loss_multiplier"]) == [1, 0, 1]
        assert list(column) == [1, 1, 1]


async def test_one_sample_raises_its_failure() -> None:
    batch = three()
    state = {name: batch[name][1] for name in batch}
    bug = TypeError("bug")
    arguments: Any = (FakePolicy(lambda prompt, stops: bug), CharacterTokenizer(), {"env": CountingEnvironment()}, 1000)
    with pytest.raises(TrajectoryFailed, match="the policy raised TypeError: bug") as caught:
        await run_sample_multi_turn_rollout(1, state, *arguments)
    assert (caught.value.kind, caught.value.stage, caught.value.tries) == ("infrastructure", "generation", 1)
    cause = caught.value.__cause__
    assert cause is not None
    assert cause.__cause__ is bug


def test_a_bug_of_the_policy_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    roll(run_multi_turn_rollout, FakePolicy(lambda prompt, stops: TypeError("bug")))
    (traced,) = [record for record in caplog.records if record.exc_info]
    assert traced.exc_info is not None
    assert isinstance(traced.exc_info[1], TypeError)
