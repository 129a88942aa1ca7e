"""The loop, in both schedulings: what a trajectory holds, how it ends, what happens to the others."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import threading
import time
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from kuberoll_workers.data.observations import RawObservations
from kuberoll_workers.data.tokenization import LONG_TEXT
from kuberoll_workers.environments.interface import EnvironmentReturn, UnusableRow
from kuberoll_workers.policy.interface import (
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
    SamplingParameters,
)
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.rollouts.settings import RetryPolicy
from kuberoll_workers.telemetry import RolloutMetrics
from tests.rollouts.fakes import (
    CharacterTokenizer,
    CountingEnvironment,
    ScriptedPolicy,
    roll,
    rollout_of,
    runners,
    sample,
    settings,
)

pytestmark = pytest.mark.parametrize("scheduling", ["Concurrent", "Lockstep"])


async def test_messages_and_counts(scheduling: str) -> None:
    began = time.time() - 0.001
    (record,) = await roll([sample()], scheduling=scheduling)
    assert [(m.role, m.content, m.turn) for m in record.messages] == [
        ("user", "prompt", 0),
        ("assistant", "x", 1),
        ("environment", "obs", 1),
        ("assistant", "x", 2),
        ("environment", "obs", 2),
    ]
    assert record.stop_reason == "terminated"
    assert record.rewards == [1.0, 1.0]
    assert record.total_reward == 2.0
    assert record.turn_count == 2
    assert dataclasses.astuple(record.tokens) == (6, 2, 6)
    assert record.idx == "row-0"
    assert record.metadata == {"turns": 0}
    assert len(record.timing.generation_seconds) == len(record.timing.environment_seconds) == 2
    first, second = record.timing.ended_at
    assert first is not None
    assert second is not None
    assert began <= first <= second <= time.time() + 0.001


async def test_every_prompt_starts_with_the_one_before_and_its_response(scheduling: str) -> None:
    policy = ScriptedPolicy(lambda request: "ab")
    (record,) = await roll([sample(metadata={"turns": 4})], policy=policy, scheduling=scheduling)
    ids = [token for message in record.messages for token in message.token_ids]
    for earlier, later in zip(policy.prompts, policy.prompts[1:], strict=False):
        assert later[: len(earlier) + 2] == [*earlier, ord("a"), ord("b")]
        assert ids[: len(later)] == later


async def test_samples_of_a_group_share_nothing(scheduling: str) -> None:
    class Scribbler(CountingEnvironment):
        def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            for log, state in zip(logs, metadata, strict=True):
                log.append("scribble")
                state["seen"].append(1)
            return super().step(logs, metadata)

    first = sample(metadata={"turns": 2, "seen": []})
    second = dataclasses.replace(first, rollout_index=1)
    before = copy.deepcopy(first)
    records = await roll([first, second], environments={"env": Scribbler()}, scheduling=scheduling)
    assert first == before
    assert [record.metadata["seen"] for record in records] == [[1, 1], [1, 1]]
    assert all(len(record.messages) == 5 for record in records)


async def test_each_task_is_answered_by_its_environment(scheduling: str) -> None:
    environments = {"a": CountingEnvironment("from a"), "b": CountingEnvironment("from b")}
    samples = [sample(index, task_name="ab"[index % 2]) for index in range(10)]
    records = await roll(samples, environments=environments, scheduling=scheduling)
    for record in records:
        observations = {m.content for m in record.messages if m.role == "environment"}
        assert observations == {f"from {record.task_name}"}


@pytest.mark.parametrize(
    ("length", "kept", "reason"),
    [(10, 3, "terminated"), (9, 2, "truncated"), (8, 1, "truncated"), (7, 0, "truncated")],
)
async def test_window(scheduling: str, length: int, kept: int, reason: str) -> None:
    # 6 of prompt and 1 generated; an observation that fills the window exactly is an overflow too.
    (record,) = await roll(
        [sample(metadata={"turns": 1 if reason == "terminated" else 5})],
        max_sequence_length=length + 1 if reason == "terminated" else length,
        environments={"env": CountingEnvironment("obs")},
        policy=ScriptedPolicy(lambda request: "x" if request.sampling.max_tokens > 1 else ""),
        scheduling=scheduling,
    )
    if length == 7:
        # Room for one token: the response is cut by it, or empty; here it is empty and the observation gets it.
        kept = 1
    assert len(record.messages[-1].token_ids) == kept
    assert record.stop_reason == reason
    assert sum(len(message.token_ids) for message in record.messages) <= length + 1


async def test_prompt_that_fills_the_window_never_reaches_the_engine(scheduling: str) -> None:
    policy = ScriptedPolicy()
    (record,) = await roll([sample(prompt="p" * 20)], policy=policy, max_sequence_length=20, scheduling=scheduling)
    assert policy.requests == []
    assert (record.stop_reason, record.turn_count, record.total_reward) == ("truncated", 0, 0.0)


async def test_response_at_its_length_limit_is_scored_and_truncated(scheduling: str) -> None:
    (record,) = await roll(
        [sample(metadata={"turns": 1})],
        policy=ScriptedPolicy(lambda request: "long answer"),
        sampling=SamplingParameters(max_tokens=4),
        scheduling=scheduling,
    )
    assert record.messages[1].content == "long"
    assert (record.stop_reason, record.total_reward, record.turn_count) == ("truncated", 1.0, 1)


async def test_turn_limit(scheduling: str) -> None:
    (record,) = await roll([sample(metadata={"turns": 9})], max_turns=3, scheduling=scheduling)
    assert (record.stop_reason, record.turn_count) == ("max_turns", 3)


async def test_end_on_the_last_turn_is_an_end(scheduling: str) -> None:
    (record,) = await roll([sample(metadata={"turns": 3})], max_turns=3, scheduling=scheduling)
    assert record.stop_reason == "terminated"


async def test_stop_strings_are_per_trajectory_and_none_clears_them(scheduling: str) -> None:
    policy = ScriptedPolicy()
    environments = {"a": CountingEnvironment(stops=["</a>"]), "b": CountingEnvironment(stops=None)}
    samples = [
        sample(0, task_name="a", stop_strings=("first",)),
        sample(1, task_name="b", stop_strings=("only",)),
        sample(2, task_name="b"),
    ]
    default = SamplingParameters(max_tokens=50, stop=("default",))
    await roll(samples, policy=policy, environments=environments, sampling=default, scheduling=scheduling)
    seen = {(r.session_id, int(r.request_id.split("-")[3])): r.sampling.stop for r in policy.requests}
    assert seen == {
        ("0-0-0", 1): ("first",),
        ("0-0-0", 2): ("</a>",),
        ("1-0-0", 1): ("only",),
        ("1-0-0", 2): (),
        ("2-0-0", 1): ("default",),
        ("2-0-0", 2): (),
    }


async def test_metadata_none_keeps_the_old(scheduling: str) -> None:
    class Silent(CountingEnvironment):
        def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            return super().step(logs, metadata)._replace(metadata=[None] * len(logs), terminateds=[False] * len(logs))

    (record,) = await roll([sample()], environments={"env": Silent()}, max_turns=3, scheduling=scheduling)
    assert record.metadata == {"turns": 2}


async def test_named_rewards_keep_their_parts(scheduling: str) -> None:
    class Named(CountingEnvironment):
        def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            parts = {"correct": [1.0] * len(logs), "style": [0.25] * len(logs)}
            return super().step(logs, metadata)._replace(rewards=parts)

    (record,) = await roll([sample()], environments={"env": Named()}, scheduling=scheduling)
    assert record.reward_parts == {"correct": [1.0, 1.0], "style": [0.25, 0.25]}
    assert (record.rewards, record.total_reward) == ([1.25, 1.25], 2.5)


async def test_empty_observation_adds_nothing(scheduling: str) -> None:
    (record,) = await roll([sample()], environments={"env": CountingEnvironment("")}, scheduling=scheduling)
    assert [(m.role, len(m.token_ids)) for m in record.messages] == [
        ("user", 6),
        *[("assistant", 1), ("environment", 0)] * 2,
    ]
    assert record.tokens.environment == 0


async def test_empty_generation_is_a_turn(scheduling: str) -> None:
    (record,) = await roll([sample()], policy=ScriptedPolicy(lambda request: ""), scheduling=scheduling)
    assert (record.stop_reason, record.tokens.generated, record.turn_count) == ("terminated", 0, 2)


async def test_row_overrides_sampling(scheduling: str) -> None:
    policy = ScriptedPolicy()
    await roll(
        [sample(sampling={"greedy": True, "max_tokens": 3}), sample(1, sampling={"temperature": 0.5})],
        policy=policy,
        scheduling=scheduling,
    )
    by_session = {request.session_id: request.sampling for request in policy.requests}
    assert (by_session["0-0-0"].temperature, by_session["0-0-0"].max_tokens) == (0.0, 3)
    assert (by_session["1-0-0"].temperature, by_session["1-0-0"].max_tokens) == (0.5, 50)


async def test_stop_strings_of_a_row_s_sampling_are_those_of_its_first_turn(scheduling: str) -> None:
    policy = ScriptedPolicy()
    samples = [
        sample(0, sampling={"stop": ["a", "b"]}),
        sample(1, sampling={"stop": ["a"]}, stop_strings=("c",)),
        sample(2),
    ]
    await roll(samples, policy=policy, sampling=SamplingParameters(max_tokens=50, stop=("d",)), scheduling=scheduling)
    stops = {request.request_id: request.sampling.stop for request in policy.requests}
    assert [stops[f"{task}-0-0-1-0"] for task in range(3)] == [("a", "b"), ("c",), ("d",)]
    # The environment answers for those of later turns.
    assert {stops[f"{task}-0-0-2-0"] for task in range(3)} == {()}


async def test_retries_are_counted_by_what_was_tried(scheduling: str) -> None:
    metrics = RolloutMetrics("job")
    refused: set[str] = set()

    def answer(request: GenerationRequest) -> str | Exception:
        if request.request_id in {"0-0-0-1-0", "0-0-0-1-1"}:
            refused.add(request.request_id)
            return PolicyUnavailable("later")
        return "x"

    async def sink(result: Any) -> None:
        assert result.stop_reason == "terminated"

    async with runners({"env": CountingEnvironment()}) as made:
        rollout = rollout_of(made, policy=ScriptedPolicy(answer), metrics=metrics, scheduling=scheduling)
        await run_rollout(rollout, [sample(0), sample(1)], sink)
    assert len(refused) == 2

    def value(stage: str) -> float | None:
        labels = {"rolloutjob": "job", "environment": "env", "stage": stage}
        return metrics.registry.get_sample_value("kuberoll_retries_total", labels)

    assert (value("generation"), value("environment") or 0) == (2, 0)
    for state in ("generation", "environment"):
        labels = {"rolloutjob": "job", "environment": "env", "state": state}
        assert metrics.registry.get_sample_value("kuberoll_trajectories_active", labels) == 0


async def test_seeds_differ_by_turn_and_not_by_try(scheduling: str) -> None:
    fails: Iterator[str | Exception] = iter([PolicyUnavailable("down"), *["x"] * 10])
    policy = ScriptedPolicy(lambda request: next(fails))
    await roll([sample()], policy=policy, scheduling=scheduling)
    first, again, second = (request.sampling.seed for request in policy.requests)
    assert first == again != second
    assert [request.request_id for request in policy.requests] == ["0-0-0-1-0", "0-0-0-1-1", "0-0-0-2-0"]


async def test_unseeded_samples_send_no_seed(scheduling: str) -> None:
    policy = ScriptedPolicy()
    await roll([sample(seed=None)], policy=policy, scheduling=scheduling)
    assert {request.sampling.seed for request in policy.requests} == {None}


@pytest.mark.parametrize(
    ("error", "kind", "tries"),
    [
        (PolicyUnavailable("down"), "infrastructure", 3),
        (PolicyRefused("token 9 is not in the vocabulary"), "data", 1),
        (RuntimeError("bug"), "infrastructure", 1),
    ],
)
async def test_failed_generation_fails_only_its_trajectory(
    scheduling: str, error: Exception, kind: str, tries: int
) -> None:
    policy = ScriptedPolicy(lambda request: error if request.session_id.startswith("1-") else "x")
    results = await roll(
        [sample(index) for index in range(3)],
        policy=policy,
        retries=RetryPolicy(generation_attempts=3, backoff_seconds=0),
        scheduling=scheduling,
    )
    assert [result.stop_reason for result in results] == ["terminated", "failed", "terminated"]
    failure = results[1]
    assert (failure.kind, failure.stage, failure.tries, failure.cause) == (kind, "generation", tries, str(error))


@pytest.mark.parametrize(
    ("response", "cause"),
    [
        (([1, 2], [-0.5], "stop"), "2 token ids but 1 logprobs"),
        (([1], [float("nan")], "stop"), "not a finite number"),
        (([1] * 99, [-0.5] * 99, "stop"), "99 tokens, more than the 50 that were requested"),
        (([1], [-0.5], "abort"), "aborted"),
    ],
)
async def test_impossible_responses_are_infrastructure_failures(
    scheduling: str, response: tuple[list[int], list[float], Any], cause: str
) -> None:
    class Broken:
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            ids, logprobs, reason = response
            return GenerationResult(token_ids=array("i", ids), logprobs=array("f", logprobs), finish_reason=reason)

    (failure,) = await roll([sample()], policy=Broken(), scheduling=scheduling)
    assert failure.kind == "infrastructure"
    assert cause in failure.cause


async def test_a_token_id_without_a_token_fails_its_trajectory_at_once(scheduling: str) -> None:
    class Padded:
        asked = 0

        async def generate(self, request: GenerationRequest) -> GenerationResult:
            self.asked += 1
            ids = array("i", [1, CharacterTokenizer.vocabulary])
            return GenerationResult(token_ids=ids, logprobs=array("f", [-0.5, -0.5]), finish_reason="stop")

    policy = Padded()
    (failure,) = await roll([sample()], policy=policy, scheduling=scheduling)
    # Its seed would sample the same again.
    assert (failure.kind, failure.stage, failure.tries, policy.asked) == ("policy", "generation", 1, 1)
    assert "spec.generation.model.tokenizer" in failure.cause


class Faulty(CountingEnvironment):
    """Goes wrong in one way, for the trajectories that its metadata marks."""

    def __init__(self, fault: Any, release: threading.Event | None = None) -> None:
        super().__init__()
        self._fault = fault
        self.release = release or threading.Event()

    def step(self, logs: list[Any], metadata: list[Any]) -> Any:
        returned = super().step(logs, metadata)
        marked = [number for number, state in enumerate(metadata) if state.get("bad")]
        if not marked:
            return returned
        if isinstance(self._fault, Exception):
            raise self._fault
        return self._fault(self, returned, marked[0])


def _hang(environment: Faulty, returned: Any, index: int) -> Any:
    environment.release.wait()
    return returned


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (ValueError("cannot judge this"), "ValueError: cannot judge this"),
        (lambda env, returned, index: returned._replace(rewards=returned.rewards[:-1]), "rewards has 0 elements for 1"),
        (lambda env, returned, index: None, "step returned NoneType"),
        (lambda env, returned, index: returned._replace(rewards=[float("nan")] * len(returned.rewards)), "finite"),
        (lambda env, returned, index: returned._replace(rewards=["one"] * len(returned.rewards)), "must be a number"),
        (lambda env, returned, index: returned._replace(observations=["hi"] * len(returned.rewards)), "observations"),
        pytest.param(_hang, "longer than stepTimeoutSeconds", marks=pytest.mark.slow),
    ],
)
async def test_environment_faults_fail_only_their_trajectory(scheduling: str, fault: Any, cause: str) -> None:
    release = threading.Event()
    # Long enough for the others, on however busy a machine.
    seconds = 1.5 if fault is _hang else 60.0
    samples = [sample(index, metadata={"turns": 2, "bad": index == 1}) for index in range(4)]
    try:
        results = await roll(
            samples, environments={"env": lambda: Faulty(fault, release)}, step_seconds=seconds, scheduling=scheduling
        )
    finally:
        release.set()
    assert [result.stop_reason for result in results] == ["terminated", "failed", "terminated", "terminated"]
    assert (results[1].kind, results[1].stage, results[1].tries) == ("environment", "environment", 2)
    assert cause in results[1].cause
    assert results[1].messages[-1].role == "assistant"
    assert results[1].metadata == {"turns": 2, "bad": True}


async def test_environment_fault_that_passes_is_retried(scheduling: str) -> None:
    class Flaky(CountingEnvironment):
        raised = False

        def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            if not self.raised:
                self.raised = True
                raise OSError("gone for a moment")
            return super().step(logs, metadata)

    (record,) = await roll([sample()], environments={"env": Flaky()}, scheduling=scheduling)
    assert record.stop_reason == "terminated"


async def test_trajectory_deadline(scheduling: str) -> None:
    class Stuck:
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            await asyncio.Event().wait()
            raise AssertionError

    (failure,) = await roll([sample()], policy=Stuck(), trajectory_seconds=0.05, scheduling=scheduling)
    assert (failure.kind, failure.stage, failure.reason) == ("operator", "trajectory", "TrajectoryDeadline")
    assert "trajectorySeconds (0.05 s)" in failure.cause


async def test_coroutine_environments(scheduling: str) -> None:
    class Remote(CountingEnvironment):
        async def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:  # type: ignore[override]
            await asyncio.sleep(0)
            return super().step(logs, metadata)

    records = await roll([sample(index) for index in range(6)], environments={"env": Remote()}, scheduling=scheduling)
    assert {record.stop_reason for record in records} == {"terminated"}


async def test_steps_travel_in_batches(scheduling: str) -> None:
    environment = CountingEnvironment()
    await roll(
        [sample(index) for index in range(32)],
        environments={"env": environment},
        concurrency=32,
        scheduling=scheduling,
    )
    assert sum(environment.batches) == 64
    assert max(environment.batches) > 8


async def test_concurrency_is_bounded(scheduling: str) -> None:
    policy = ScriptedPolicy()
    await roll([sample(index) for index in range(20)], policy=policy, concurrency=3, scheduling=scheduling)
    assert policy.most_in_flight == 3


async def test_unknown_task_is_refused(scheduling: str) -> None:
    with pytest.raises((KeyError, ExceptionGroup)) as caught:
        await roll([sample(task_name="chess")], scheduling=scheduling)
    error = caught.value
    inner = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
    assert "no environment is named 'chess'; known ones are env" in str(inner)


async def test_no_samples(scheduling: str) -> None:
    assert await roll([], scheduling=scheduling) == []


async def test_drain_finishes_what_is_in_flight_and_begins_nothing(scheduling: str) -> None:
    drain = Drain()
    ended: list[Any] = []

    async def sink(result: Any) -> None:
        ended.append(result)
        drain.set()

    def endless() -> Any:
        index = 0
        while True:
            yield sample(index)
            index += 1

    policy = ScriptedPolicy()
    async with runners({"env": CountingEnvironment()}) as made:
        rollout = Rollout(
            policy=policy,
            environments=made,
            tokenizer=CharacterTokenizer(),
            settings=settings(scheduling=scheduling, concurrency=5),
            metrics=RolloutMetrics("test"),
        )
        await run_rollout(rollout, endless(), sink, drain)
    begun = {request.session_id for request in policy.requests}
    assert len(ended) == len(begun)
    assert all(result.stop_reason == "terminated" for result in ended)


async def test_metrics_count_what_happened(scheduling: str) -> None:
    metrics = RolloutMetrics("job")
    results: list[Any] = []

    async def sink(result: Any) -> None:
        results.append(result)

    policy = ScriptedPolicy(lambda request: PolicyRefused("no") if request.session_id.startswith("0-") else "xyz")
    async with runners({"env": CountingEnvironment()}) as made:
        rollout = Rollout(
            policy=policy,
            environments=made,
            tokenizer=CharacterTokenizer(),
            settings=settings(scheduling=scheduling),
            metrics=metrics,
        )
        await run_rollout(rollout, [sample(0), sample(1), sample(2)], sink)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"rolloutjob": "job", "environment": "env", **labels})

    assert value("kuberoll_trajectories_total", stop_reason="terminated") == 2
    assert value("kuberoll_trajectories_total", stop_reason="failed") == 1
    assert value("kuberoll_failures_total", kind="data", stage="generation") == 1
    assert value("kuberoll_turns_total", turn="1") == 2
    assert value("kuberoll_turn_generation_seconds_count", turn="2") == 2
    assert value("kuberoll_tokens_total", kind="generated") == 12
    assert value("kuberoll_tokens_total", kind="environment") == 12
    assert value("kuberoll_tokens_total", kind="prompt") == 2 * (6 + 12)
    assert value("kuberoll_reward_total", sign="positive") == 4
    assert value("kuberoll_trajectories_active", state="generation") == 0


async def test_a_row_that_the_environment_refuses_is_a_data_failure_without_another_try(scheduling: str) -> None:
    environment = Faulty(UnusableRow("metadata.turns: found 'x'"))
    samples = [sample(index, metadata={"turns": 1, "bad": index == 1}) for index in range(3)]
    results = await roll(samples, environments={"env": environment}, scheduling=scheduling)
    assert [result.stop_reason for result in results] == ["terminated", "failed", "terminated"]
    failure = results[1]
    assert (failure.kind, failure.stage, failure.tries, failure.cause) == (
        "data",
        "environment",
        1,
        "metadata.turns: found 'x'",
    )


@pytest.mark.parametrize("change", ["append", "overwrite"])
async def test_a_policy_that_changes_its_prompt_is_found_out(scheduling: str, change: str) -> None:
    class Meddling(ScriptedPolicy):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            result = await super().generate(request)
            if request.session_id.startswith("1-"):
                if change == "append":
                    request.token_ids.append(0)
                else:
                    request.token_ids[0] += 1
            return result

    metrics = RolloutMetrics("job")
    results: list[Any] = []

    async def sink(result: Any) -> None:
        results.append(result)

    async with runners({"env": CountingEnvironment()}) as made:
        rollout = rollout_of(made, policy=Meddling(), metrics=metrics, scheduling=scheduling)
        await run_rollout(rollout, [sample(index) for index in range(3)], sink)
    failed = [result for result in results if result.stop_reason == "failed"]
    assert [(failure.task_index, failure.kind, failure.stage) for failure in failed] == [
        (1, "infrastructure", "trajectory")
    ]
    assert "context" in failed[0].cause
    assert failed[0].tries == 1
    labels = {"rolloutjob": "job", "environment": "env"}
    assert metrics.registry.get_sample_value("kuberoll_prefix_violations_total", labels) == 1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["generation", "environment"])
async def test_turn_deadline(scheduling: str, where: str) -> None:
    class Stuck(ScriptedPolicy):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            if where == "generation" and request.session_id.startswith("1-"):
                await asyncio.Event().wait()
            return await super().generate(request)

    class StuckEnvironment(CountingEnvironment):
        async def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:  # type: ignore[override]
            if where == "environment" and metadata[0].get("bad"):
                await asyncio.Event().wait()
            return super().step(logs, metadata)

    results = await roll(
        [sample(index, metadata={"turns": 2, "bad": index == 1}) for index in range(3)],
        policy=Stuck(),
        environments={"env": StuckEnvironment()},
        turn_seconds=2,
        scheduling=scheduling,
    )
    assert [result.stop_reason for result in results] == ["terminated", "failed", "terminated"]
    assert (results[1].reason, results[1].stage) == ("TurnDeadline", where)
    assert results[1].cause == "the turn took longer than rollout.timeouts.turnSeconds (2 s)"


async def test_a_turn_that_cannot_be_journaled_fails_its_trajectory(scheduling: str) -> None:
    async def full(turn: Any) -> None:
        raise OSError("No space left on device")

    results: list[Any] = []

    async def sink(result: Any) -> None:
        results.append(result)

    async with runners({"env": CountingEnvironment()}) as made:
        rollout = rollout_of(made, turn_sink=full, scheduling=scheduling)
        await run_rollout(rollout, [sample(0), sample(1, metadata={"turns": 1})], sink)
    by_task = {result.task_index: result for result in results}
    assert by_task[0].kind == "infrastructure"
    assert (by_task[0].stage, by_task[0].tries) == ("trajectory", 1)
    assert by_task[0].cause == "the turn could not be journaled: No space left on device"
    # Its only turn is in its record.
    assert by_task[1].stop_reason == "terminated"


async def test_what_the_sink_raises_stops_the_run(scheduling: str) -> None:
    async def broken(result: Any) -> None:
        raise OSError("No space left on device")

    async with runners({"env": CountingEnvironment()}) as made:
        with pytest.raises(OSError, match="No space left") as caught:
            await run_rollout(rollout_of(made, scheduling=scheduling), [sample(n) for n in range(9)], broken)
        # Of several errors the others are not lost; a single one is itself.
        if (several := caught.value.__cause__) is not None:
            assert isinstance(several, BaseExceptionGroup)
            assert len(several.exceptions) > 1
        with pytest.raises(OSError, match="No space left") as caught:
            await run_rollout(rollout_of(made, scheduling=scheduling), [sample()], broken)
        assert caught.value.__cause__ is None


async def test_an_error_of_the_policy_that_is_called_a_timeout_is_no_deadline(scheduling: str) -> None:
    policy = ScriptedPolicy(lambda request: TimeoutError("the policy's own"))
    (failure,) = await roll([sample()], policy=policy, turn_seconds=60, trajectory_seconds=60, scheduling=scheduling)
    assert (failure.kind, failure.stage, failure.cause) == ("infrastructure", "generation", "the policy's own")


async def test_a_cancellation_that_nobody_asked_for_fails_its_trajectory(scheduling: str) -> None:
    class Cancelling(ScriptedPolicy):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            if request.session_id.startswith("1-"):
                raise asyncio.CancelledError
            return await super().generate(request)

    results = await roll([sample(index) for index in range(4)], policy=Cancelling(), scheduling=scheduling)
    assert [result.stop_reason for result in results] == ["terminated", "failed", "terminated", "terminated"]
    assert "CancelledError" in results[1].cause
    assert (results[1].kind, results[1].stage, results[1].tries) == ("infrastructure", "trajectory", 1)


async def test_an_observation_that_cannot_be_rendered_fails_its_trajectory(scheduling: str) -> None:
    class Picky(RawObservations):
        def render(self, role: str, content: str, **more: Any) -> Any:
            if content == "odd":
                raise LookupError("no such role")
            return super().render(role, content, **more)

    environments = {"env": CountingEnvironment(), "odd": CountingEnvironment("odd")}
    samples = [sample(0), sample(1, task_name="odd"), sample(2)]
    observations = Picky(CharacterTokenizer())
    results = await roll(samples, environments=environments, observations=observations, scheduling=scheduling)
    assert [result.stop_reason for result in results] == ["terminated", "failed", "terminated"]
    assert (results[1].stage, results[1].tries, results[1].turn_count) == ("environment", 1, 1)
    assert "no such role" in results[1].cause


async def test_a_policy_is_told_of_each_session_that_it_has_seen_once_it_is_over(scheduling: str) -> None:
    class Sessions(ScriptedPolicy):
        def __init__(self) -> None:
            super().__init__(lambda request: PolicyRefused("no") if request.session_id == "1-0-0" else "x")
            self.over: list[str] = []

        def end_session(self, session_id: str) -> None:
            self.over.append(session_id)

    policy = Sessions()
    # The last one's prompt fills the window: the policy never hears of it.
    samples = [*(sample(index) for index in range(3)), sample(3, prompt="p" * 2000)]
    results = await roll(samples, policy=policy, scheduling=scheduling)
    assert [result.stop_reason for result in results] == ["terminated", "failed", "terminated", "truncated"]
    assert sorted(policy.over) == ["0-0-0", "1-0-0", "2-0-0"]


async def test_rewards_that_add_up_to_no_number_fail_their_trajectory(scheduling: str) -> None:
    class Generous(CountingEnvironment):
        def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            returned = super().step(logs, metadata)
            return returned._replace(rewards=[3e38 if state.get("rich") else 1.0 for state in metadata])

    samples = [sample(index, metadata={"turns": 3, "rich": index == 1}) for index in range(4)]
    results = await roll(samples, environments={"env": Generous()}, scheduling=scheduling)
    assert [result.stop_reason for result in results] == ["terminated", "failed", "terminated", "terminated"]
    assert (results[1].kind, results[1].stage) == ("environment", "environment")
    assert "the sum of the rewards of 2 turns is 6e+38" in results[1].cause


async def test_long_observations_are_encoded_beside_the_event_loop(scheduling: str) -> None:
    class Slow(CharacterTokenizer):
        def __init__(self) -> None:
            self.threads: set[str] = set()

        def encode(self, text: str) -> Any:
            if len(text) > LONG_TEXT:
                self.threads.add(threading.current_thread().name)
            return super().encode(text)

    tokenizer = Slow()
    results = await roll(
        [sample(0, metadata={"turns": 1})],
        environments={"env": CountingEnvironment("x" * (LONG_TEXT + 1))},
        observations=RawObservations(tokenizer),
        scheduling=scheduling,
        max_sequence_length=2 * LONG_TEXT,
    )
    assert results[0].tokens.environment == LONG_TEXT + 1
    assert tokenizer.threads
    assert threading.main_thread().name not in tokenizer.threads
