"""NeMo Gym's rollouts through NeMo RL's functions: groups, failures, rewards and metrics."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kuberoll_workers.adapters.nemo_rl import (
    NemoGymRolloutResult,
    RolloutFailed,
    RolloutLimits,
    run_async_nemo_gym_rollout,
    run_nemo_gym_rollout_sync,
)
from tests.adapters.nemo_rl.fake_gym import CONFIG, WINDOW, Gym, Policy, Tokenizer, batch_of, result
from tests.adapters.nemo_rl.fakes import ids_of, same

LIMITS = RolloutLimits(backoff_seconds=0.0)


async def groups(
    gym: Any, batch: Any, size: int, *, config: dict[str, Any] | None = None, **options: Any
) -> list[NemoGymRolloutResult]:
    found: list[NemoGymRolloutResult] = []
    await collect(found, gym, batch, size, config=config, **options)
    return found


async def collect(
    found: list[NemoGymRolloutResult],
    gym: Any,
    batch: Any,
    size: int,
    *,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    settings: dict[str, Any] = {"log_full_result_tables": False, "limits": LIMITS} | options
    stream = run_async_nemo_gym_rollout(
        Policy(), batch, Tokenizer(), {"nemo_gym": gym}, CONFIG | (config or {}), size, **settings
    )
    async for group in stream:
        found.append(group)  # noqa: PERF401 - what came before an error is kept


def whole(gym: Any, batch: Any, **options: Any) -> NemoGymRolloutResult:
    settings: dict[str, Any] = {"log_full_result_tables": False, "limits": LIMITS} | options
    return run_nemo_gym_rollout_sync(Policy(), batch, Tokenizer(), {"nemo_gym": gym}, CONFIG, **settings)


def by_row(*results: dict[str, Any] | Exception) -> Callable[[dict[str, Any], int], Any]:
    return lambda row, attempt: copy.deepcopy(results[row["_rowidx"]])


def test_a_batch() -> None:
    gym = Gym(by_row(result(("ask", "yes"), ("more", "no!")), result(("longer", "x"), reward=0.0)))
    batch = batch_of(2)
    before = copy.deepcopy(batch)
    got = whole(gym, batch)
    assert same(batch, before)
    assert got.input_ids.tolist() == [[*map(ord, "ask"), 0, 0, 0], [*map(ord, "longer")]]
    assert got.input_ids.dtype is torch.int64
    final = got.final_batch
    assert type(final) is type(batch)
    assert [message["role"] for message in final["message_log"][0]] == ["user", "assistant"] * 2
    assert final["message_log"][0][2]["token_ids"].tolist() == ids_of("more").tolist()
    assert same(final["message_log"][0][1]["generation_logprobs"], -ids_of("yes") / 1000)
    assert same(final["total_reward"], torch.tensor([1.0, 0.0]))
    assert final["length"].tolist() == [3, 6]
    assert final["loss_multiplier"].tolist() == [1, 1]
    assert final["truncated"].tolist() == final["mask_sample"].tolist() == [False, False]
    assert final["agent_ref"] == [row["agent_ref"] for row in batch["extra_env_info"]]
    assert (final["stop_reason"], final["failure"]) == (["terminated"] * 2, [None, None])
    assert got.task_index is None
    assert got.rollout_metrics["timing/rollout/await_results"] == 1.0
    assert {"timing/rollout/total", "timing/rollout/run_rollouts"} <= set(got.rollout_metrics)


def test_rows_carry_the_sampling_parameters_and_their_number() -> None:
    gym, batch = Gym(), batch_of(2)
    batch["extra_env_info"][1]["responses_create_params"]["max_output_tokens"] = 5
    whole(gym, batch)
    sent = [row["responses_create_params"] for row in gym.rows]
    assert [(row["temperature"], row["top_p"], row["max_output_tokens"]) for row in sent] == [
        (0.7, 0.9, 16),
        (0.7, 0.9, 5),
    ]
    assert [row["_rowidx"] for row in gym.rows] == [0, 1]
    gym = Gym()
    whole(gym, batch, sampling_params=SimpleNamespace(temperature=0.0, top_p=1.0, top_k=None))
    assert gym.rows[0]["responses_create_params"]["temperature"] == 0.0


async def test_groups_come_as_they_become_complete_each_in_the_order_of_its_rows() -> None:
    batch = batch_of(4)
    for number, row in enumerate(batch["extra_env_info"]):
        row["_ng_task_index"] = 7 + number // 2
    gym = Gym(by_row(*(result((f"prompt {number // 2}", "a" * (number + 1))) for number in range(4))))
    found = await groups(gym, batch, 2)
    assert [group.task_index for group in found] == [8, 7]
    lengths = [[len(log[1]["token_ids"]) for log in group.final_batch["message_log"]] for group in found]
    assert lengths == [[3, 4], [1, 2]]
    assert found[0].input_ids.tolist() == [[*map(ord, "prompt 1")]] * 2
    # Timings are of the whole call, so the last group has them.
    assert ["timing/rollout/total" in group.rollout_metrics for group in found] == [False, True]


async def test_a_consumer_that_leaves_ends_the_stream() -> None:
    gym = Gym()
    stream = run_async_nemo_gym_rollout(
        Policy(), batch_of(4), Tokenizer(), {"nemo_gym": gym}, CONFIG, 2, log_full_result_tables=False
    )
    async with aclosing(stream):
        await anext(stream)
    assert gym.closed == 1


async def test_it_works_where_a_loop_runs() -> None:
    assert whole(Gym(), batch_of(1)).final_batch["total_reward"].tolist() == [1.0]


def test_metrics() -> None:
    plays = [result(("ab", "cde"), ("f", "gh"), reward=0.5, solved=True, note="text"), result(("a", "b"), reward=1.5)]
    got = whole(Gym(by_row(*plays)), batch_of(2), log_full_result_tables=True).rollout_metrics
    expected = {
        "turns_per_sample/mean": 1.5, "turns_per_sample/max": 2, "turns_per_sample/p95": 2, "turns_per_sample/p99": 2,
        "total_tokens_per_sample/mean": 5.0, "total_tokens_per_sample/median": 5.0,
        "gen_tokens_per_sample/mean": 3.0, "gen_tokens_per_sample/min": 1, "mean_gen_tokens_per_sample": 3.0,
        "max_gen_tokens_per_turn/max": 3, "max_gen_tokens_per_turn/mean": 2.0, "max_gen_tokens_per_turn/p95": 3,
        "total_reward/mean": 1.0, "total_reward/stddev": math.sqrt(0.5),
        "natural_termination_rate": 1.0, "truncation_rate": 0.0, "failed_rate": 0.0, "failed_samples": 0,
        "math/reward/mean": 1.0, "math/solved/mean": 0.5,
    }  # fmt: skip
    assert {name: got[name] for name in expected} == pytest.approx(expected)
    assert sum(got["turns_per_sample/histogram"].histogram) == 2
    assert [len(row) for row in got["math/full_result"].data] == [1, 1]
    assert "math/note/mean" not in got
    assert math.isnan(whole(Gym(), batch_of(1)).rollout_metrics["total_reward/stddev"])


def test_a_sequence_that_fills_the_window_and_a_cut_response_are_truncated() -> None:
    full = result(("p", "x" * (WINDOW - 1)))
    cut = result(("p", "x"), response={"output": [], "incomplete_details": {"reason": "max_output_tokens"}})
    got = whole(Gym(by_row(full, cut, result(("p", "x")))), batch_of(3))
    assert got.final_batch["truncated"].tolist() == [True, True, False]
    assert got.rollout_metrics["truncation_rate"] == pytest.approx(2 / 3)
    assert got.final_batch["stop_reason"] == ["truncated", "truncated", "terminated"]


@pytest.mark.parametrize("config", [{"trtllm_cfg": {"max_model_len": 3}}, {"max_total_sequence_length": 3}])
def test_windows_of_other_engines(config: dict[str, Any]) -> None:
    gym = Gym(by_row(result(("p", "xx"))))
    got = run_nemo_gym_rollout_sync(
        Policy(**config), batch_of(1), Tokenizer(), {"nemo_gym": gym}, CONFIG, log_full_result_tables=False
    )
    assert got.final_batch["truncated"].tolist() == [True]


def test_flagged_samples_are_masked_unless_that_is_off() -> None:
    gym = Gym(by_row(result(("p", "x"), instance_config={"mask_sample": True}), result(("p", "x"))))
    assert whole(gym, batch_of(2)).final_batch["mask_sample"].tolist() == [True, False]
    assert "mask_sample" not in whole(gym, batch_of(2), mask_env_flagged_samples=False).final_batch


def test_named_rewards() -> None:
    parts = result(("p", "x"), reward=1.5, reward_components={"b": 1.0, "a": 0.5})
    got = whole(Gym(by_row(parts, result(("p", "x"), reward=0.0))), batch_of(2)).final_batch
    assert got["reward/a"].tolist() == [0.5, 0.0]
    assert got["reward/b"].tolist() == [1.0, 0.0]


def test_rows_that_a_broken_stream_lost_are_played_alone() -> None:
    def play(row: dict[str, Any], attempt: int) -> Any:
        fails = row["_rowidx"] == 1 and attempt == 1
        return ConnectionError("reset") if fails else result(("p", "x"))

    gym = Gym(play)
    got = whole(gym, batch_of(3))
    assert gym.calls[0] == [0, 1, 2]
    assert sorted(gym.calls[1:]) == [[0], [1]]
    assert got.final_batch["failure"] == [None] * 3
    assert gym.closed == 3


def test_a_row_fails_alone() -> None:
    gym = Gym(by_row(result(("p", "x"), reward=0.5), RuntimeError("no server"), result(("p", "x"))))
    got = whole(gym, batch_of(3, message_log=[[{"role": "user", "content": "", "token_ids": ids_of("p")}]] * 3))
    final, failure = got.final_batch, got.final_batch["failure"][1]
    assert final["total_reward"].isnan().tolist() == [False, True, False]
    assert final["loss_multiplier"].tolist() == [1, 0, 1]
    assert final["mask_sample"].tolist() == [False, True, False]
    assert final["stop_reason"] == ["terminated", "failed", "terminated"]
    assert (failure.kind, failure.tries, failure.task_index, failure.idx) == ("environment", 2, 1, 101)
    assert "no server" in failure.cause
    assert "play" in failure.traceback
    assert [len(log) for log in final["message_log"]] == [2, 1, 2]
    assert got.input_ids.tolist() == [[ord("p")]] * 3
    metrics = got.rollout_metrics
    assert (metrics["failed_samples"], metrics["failed_rate"]) == (1, pytest.approx(1 / 3))
    # A failure is not a reward of 0.
    assert metrics["total_reward/mean"] == 0.75


def test_a_batch_whose_rows_all_fail() -> None:
    got = whole(Gym(lambda row, attempt: RuntimeError("down")), batch_of(2))
    assert got.final_batch["total_reward"].isnan().all()
    assert got.input_ids.shape == (2, 0)
    assert math.isnan(got.rollout_metrics["total_reward/mean"])
    assert got.rollout_metrics["failed_rate"] == 1.0


async def test_raised_when_all_other_groups_have_been_yielded() -> None:
    plays = by_row(*(RuntimeError("down") if row == 5 else result(("p", "x")) for row in range(6)))
    found: list[NemoGymRolloutResult] = []
    with pytest.raises(RolloutFailed, match=r"1 of 6 samples failed; the first, sample 5.*down") as caught:
        await collect(found, Gym(plays), batch_of(6), 2, on_failure="raise")
    assert len(found) == 2
    assert caught.value.batch["stop_reason"] == ["terminated", "failed"]
    assert [failure.idx for failure in caught.value.failures] == [105]


def change(**changes: Any) -> dict[str, Any]:
    return {**result(("p", "xyz")), **changes}


def with_message(at: int, **changes: Any) -> dict[str, Any]:
    made = result(("p", "xyz"))
    made["message_log"][at] = {**made["message_log"][at], **changes}
    return made


@pytest.mark.parametrize(
    ("played", "cause"),
    [
        (change(full_result=None), "no mapping with message_log and full_result"),
        (change(message_log=[]), "message_log is empty"),
        (change(message_log=result(("p", "x"))["message_log"][:1]), "has no response"),
        (with_message(1, role="user"), r"message_log\[1\]: expected a message of the assistant"),
        (with_message(1, token_ids=torch.tensor([0.5])), r"message_log\[1\].token_ids: token ids must be whole"),
        (with_message(1, generation_logprobs=None), "generation_logprobs are missing"),
        (with_message(1, generation_logprobs=torch.zeros(2)), r"3 token ids but generation_logprobs of shape \[2\]"),
        (with_message(1, generation_logprobs=torch.tensor([0.0, math.nan, 0.0])), "not a finite number"),
        (change(input_message_log=[]), "must be the first message"),
        (change(input_message_log=[{"token_ids": [1]}]), "differ from those of message_log"),
        (result(("p", "x"), reward=math.nan), "must be a finite number; found float nan"),
        (result(("p", "x"), reward_components={"a": 3.0}), "reward_components sum to 3.0"),
        (result(("p", "x"), reward_components=[1]), "must be numbers by name"),
        (result(("p", "x"), reward=0.0, _ng_failure_class="judge_failed"), "reports a failed rollout: judge_failed"),
    ],
)
def test_impossible_results_fail_their_row(played: dict[str, Any], cause: str) -> None:
    gym = Gym(by_row(played, result(("p", "x"))))
    final = whole(gym, batch_of(2)).final_batch
    assert final["failure"][1] is None
    assert final["total_reward"].isnan().tolist() == [True, False]
    with pytest.raises(RolloutFailed, match=cause):
        whole(gym, batch_of(2), on_failure="raise")


def test_a_failure_that_a_retry_cannot_mend_is_not_retried() -> None:
    gym = Gym(by_row(result(("p", "x"), _ng_failure_class="bad_row", _ng_failure_terminal=True)))
    failure = whole(gym, batch_of(1)).final_batch["failure"][0]
    assert (failure.kind, failure.tries, gym.calls) == ("data", 1, [[0]])


def test_failures_of_the_infrastructure_are_told_apart() -> None:
    class RolloutInfraFailure(Exception):
        pass

    class GymTransportError(RolloutInfraFailure):
        pass

    gym = Gym(lambda row, attempt: GymTransportError("503"))
    failure = whole(gym, batch_of(1)).final_batch["failure"][0]
    assert (failure.kind, failure.cause) == ("infrastructure", "GymTransportError: 503")


def test_an_early_end_is_a_failure_of_the_rows_that_are_missing() -> None:
    class Short(Gym):
        async def run_rollouts(self, rows: Any, timer_prefix: str, deduplicate: bool = False) -> Any:
            yield rows[0]["_rowidx"], result(("p", "x")), None

    got = whole(Short(), batch_of(3), limits=RolloutLimits(environment_attempts=1))
    assert [failure and failure.cause for failure in got.final_batch["failure"]] == [
        None,
        *["NeMo Gym's stream ended before this row arrived"] * 2,
    ]


def test_a_hanging_rollout_ends_with_its_time() -> None:
    class Hanging(Gym):
        async def run_rollouts(self, rows: Any, timer_prefix: str, deduplicate: bool = False) -> Any:
            yield 0, result(("p", "x")), None
            await asyncio.Event().wait()

    limits = RolloutLimits(environment_attempts=1, trajectory_seconds=0.05)
    failures = whole(Hanging(), batch_of(2), limits=limits).final_batch["failure"]
    assert failures[0] is None
    assert (failures[1].kind, "exceeded 0.05 s" in failures[1].cause) == ("infrastructure", True)


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [(7, ValueError, "row 7, but there are 2 rows"), (1, ValueError, "row 1 twice"), ("0", TypeError, "'0' as the")],
)
def test_rows_that_cannot_be_told_apart_end_the_call(number: Any, error: type[Exception], words: str) -> None:
    def play(row: dict[str, Any], attempt: int) -> Any:
        return {**result(("p", "x")), **({"_as": number} if row["_rowidx"] == 0 else {})}

    with pytest.raises(error, match=words):
        whole(Gym(play), batch_of(2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"greedy": True}, "greedy"),
        ({"max_rollout_turns": 3}, "max_rollout_turns"),
        ({"config": {"stop_strings": ["x"]}}, "stop_strings"),
        ({"config": {"stop_token_ids": [1]}}, "stop_token_ids"),
        ({"config": {"top_k": 5}}, "top_k"),
    ],
)
async def test_options_without_effect_are_refused(options: dict[str, Any], words: str) -> None:
    gym = Gym()
    with pytest.raises(AssertionError, match=words):
        await groups(gym, batch_of(2), 2, **options)
    assert gym.calls == []


def _mixed() -> Any:
    batch = batch_of(2)
    batch["extra_env_info"][1]["agent_ref"] = {"name": "code"}
    return batch


def _two_tasks() -> Any:
    batch = batch_of(2)
    for number, row in enumerate(batch["extra_env_info"]):
        row["_ng_task_index"] = number
    return batch


def _images() -> Any:
    return batch_of(2, message_log=[[{"role": "user", "token_ids": ids_of("p"), "vllm_images": ["image"]}]] * 2)


@pytest.mark.parametrize(
    ("batch", "size", "error", "words"),
    [
        (batch_of(0), 2, ValueError, "there are no rows"),
        (batch_of(3), 2, ValueError, "the number of rows, 3, must be divisible by num_generations, 2"),
        (batch_of(3), 0, ValueError, "greater than zero"),
        (batch_of(2, extra_env_info=[{}, {}]), 2, TypeError, r"extra_env_info\[0\].*responses_create_params"),
        (batch_of(2, extra_env_info=[{"responses_create_params": {}}] * 2), 2, TypeError, "agent_ref"),
        (batch_of(2, message_log=[[]]), 2, ValueError, "message_log has 1 entries but extra_env_info 2"),
        (_mixed(), 2, ValueError, "must have one agent"),
        (_two_tasks(), 2, ValueError, "must have one _ng_task_index"),
        (_images(), 2, ValueError, r"message_log\[0\]\[0\].vllm_images: only text"),
    ],
)
async def test_batches_that_cannot_be_played_are_refused(
    batch: Any, size: int, error: type[Exception], words: str
) -> None:
    gym = Gym()
    with pytest.raises(error, match=words):
        await groups(gym, batch, size)
    assert gym.calls == []


def test_a_whole_batch_may_mix_agents() -> None:
    got = whole(Gym(), _mixed())
    assert {"math/reward/mean", "code/reward/mean"} <= set(got.rollout_metrics)


def test_a_limit_beyond_the_window_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=f"max_seq_len is 100 but the engine's window is {WINDOW}"):
        whole(Gym(), batch_of(1), max_seq_len=100)


def test_rewards_by_effort() -> None:
    batch = batch_of(3)
    batch["extra_env_info"][0]["responses_create_params"]["input"] = "be brief"
    batch["extra_env_info"][1]["responses_create_params"]["input"] = [
        {"role": "user", "content": [{"type": "input_text", "text": "be brief"}]}
    ]
    gym = Gym(by_row(result(("p", "x" * 5), reward=0.5), result(("p", "x" * 20), reward=0.5), result(("p", "xx"))))
    effort = {"low_weight": 1.0, "low_penalty": 2.0, "low_ub": 10, "low_string": "brief"}
    for config in (effort, SimpleNamespace(**effort)):
        got = whole(gym, batch, effort_config=config)
        # 1 - 5/10 = 0.5 is added as a share; 1 - 20/10 = -1 is a penalty of 2.
        assert got.final_batch["total_reward"].tolist() == [0.75, -1.5, 1.0]
        assert got.rollout_metrics["mean_length_reward_low"] == -0.25
        assert got.rollout_metrics["mean_reward_low"] == -0.375
        assert got.rollout_metrics["median_length_low"] == 12.5
        assert got.rollout_metrics["mean_length_high"] == 2.0
        assert got.rollout_metrics["math/reward/max"] == 1.0
    assert whole(gym, batch, effort_config={**effort, "low_weight": 0}).final_batch["total_reward"][0] == 0.5


def output(*items: dict[str, Any]) -> dict[str, Any]:
    return result(("p", "x"), response={"output": list(items)})


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"text": text}]}


def answer(text: str) -> dict[str, Any]:
    return {"type": "message", "content": [{"text": text}]}


def thinking(prompt: str, response: str, **message: Any) -> dict[str, Any]:
    made = result((prompt, response), response={"output": []})
    made["message_log"][1] |= message
    return made


@pytest.mark.parametrize(
    ("flag", "metric", "plays", "rewards"),
    [
        (
            "penalize_duplicated_reasoning", "reasoning_equal_to_final_answer_rate",
            [output(reasoning("42"), answer(" 42")), output(reasoning("6*7"), answer("42")), output(reasoning("42"))],
            [0, 1, 1],
        ),
        (
            "penalize_empty_final_answer", "empty_final_answer_rate",
            [output(answer("42"), answer(" ")), output(reasoning("hm")), output({"type": "function_call"}),
             output(answer("42"))],
            [0, 0, 1, 1],
        ),
        (
            "penalize_unwanted_tokens", "unwanted_token_rate",
            [result(("p", "a#b")), result(("#", "ab"))],
            [0, 1],
        ),
        (
            "penalize_malformed_think_tag", "malformed_think_tag_rate",
            [thinking("p<", "hm>ok"), thinking("p<", "hm"), thinking("p<>", "ok"), thinking("p", "hm>"),
             thinking("p<<", ">"), thinking("p", "ok", has_malformed_thinking=True),
             output({**answer("x"), "generation_str": "<think>"}),
             output({**answer("x"), "generation_str": "</think></think>"})],
            [1, 0, 1, 0, 0, 0, 0, 0],
        ),
    ],
)  # fmt: skip
def test_penalties(flag: str, metric: str, plays: list[dict[str, Any]], rewards: list[float]) -> None:
    config = {flag: True, "token_ids": {"unwanted": [ord("#")]}}
    got = whole(Gym(by_row(*plays)), batch_of(len(plays)), reward_penalty_config=config)
    assert got.final_batch["total_reward"].tolist() == rewards
    assert got.rollout_metrics[metric] == pytest.approx(rewards.count(0) / len(plays))
    off = whole(Gym(by_row(*plays)), batch_of(len(plays)), reward_penalty_config={flag: False})
    assert off.final_batch["total_reward"].tolist() == [1] * len(plays)
    assert metric not in off.rollout_metrics


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"penalize_unwanted_tokens": True}, "token_ids.unwanted must be set"),
        ({"penalize_malformed_think_tag": True, "thinking_tags": ["<t>"]}, "an opening and a closing tag"),
        (
            {"penalize_malformed_think_tag": True, "thinking_tags": ["<t>", "</t>"], "token_ids": {"think_open": 5}},
            "think_open and think_close must both be set",
        ),
    ],
)
def test_penalties_without_their_settings_are_refused(config: dict[str, Any], words: str) -> None:
    gym = Gym()
    with pytest.raises(ValueError, match=words):
        whole(gym, batch_of(1), reward_penalty_config=config)
    assert gym.calls == []


def test_penalties_that_would_contradict_named_rewards_are_refused() -> None:
    gym = Gym(by_row(result(("p", "#"), reward_components={"a": 1.0})))
    config = {"penalize_unwanted_tokens": True, "token_ids": {"unwanted": ord("#")}}
    with pytest.raises(ValueError, match="no longer the sum of its reward_components"):
        whole(gym, batch_of(1), reward_penalty_config=config)
