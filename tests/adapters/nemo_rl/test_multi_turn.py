"""run_multi_turn_rollout, run_async_multi_turn_rollout and run_sample_multi_turn_rollout: what they make of a batch."""

from __future__ import annotations

import asyncio
import copy
import math
import sys
import threading
import types
from typing import Any

import pytest
import torch

from kuberoll_workers.adapters.nemo_rl import (
    BatchedDataDict,
    RolloutLimits,
    batched_message_log_to_flat_message,
    run_async_multi_turn_rollout,
    run_async_multi_turn_rollout_groups,
    run_multi_turn_rollout,
    run_sample_multi_turn_rollout,
)
from kuberoll_workers.environments import EnvironmentReturn
from tests.adapters.nemo_rl.fakes import (
    FAST,
    CharacterTokenizer,
    CountingEnvironment,
    FakePolicy,
    batch_of,
    contents,
    ids_of,
    same,
)

FACES = pytest.mark.parametrize("run", [run_multi_turn_rollout, run_async_multi_turn_rollout])


def roll(run: Any, batch: Any, policy: Any = None, environment: Any = None, **more: Any) -> Any:
    """The finished batch and its metrics."""
    environments = more.pop("task_to_env", {"env": environment or CountingEnvironment()})
    max_seq_len = more.pop("max_seq_len", 1000)
    return run(
        policy or FakePolicy(), batch, CharacterTokenizer(), environments, max_seq_len, **{"limits": FAST, **more}
    )


@FACES
def test_messages(run: Any) -> None:
    final, metrics = roll(run, batch_of({"turns": 2}, prompts=["ab"]), FakePolicy(lambda prompt, stops: "xy"))
    assert isinstance(final, BatchedDataDict)
    (log,) = final["message_log"]
    assert contents(log) == [
        ("user", "ab"), ("assistant", "xy"), ("environment", "obs"), ("assistant", "xy"), ("environment", "obs"),
    ]  # fmt: skip
    for message in log:
        assert torch.equal(message["token_ids"], ids_of(message["content"]))
        assert message["token_ids"].dtype is torch.int64
        if message["role"] == "assistant":
            assert torch.equal(message["generation_logprobs"], -message["token_ids"] / 1000)
            assert message["generation_logprobs"].dtype is torch.float32
        else:
            assert "generation_logprobs" not in message
    assert final["total_reward"].tolist() == [2.0]
    assert final["total_reward"].dtype is torch.float32
    assert (final["stop_reason"], final["truncated"].tolist(), final["failure"]) == (["terminated"], [False], [None])
    assert final["extra_env_info"] == [{"turns": 0}]
    assert metrics["total_turns"] == 2
    assert metrics["mean_gen_tokens_per_sample"] == 4.0
    assert metrics["mean_env_tokens_per_sample"] == 6.0
    assert metrics["mean_total_reward"] == 2.0


class Calculator:
    """A tool: `[a, b, sum]<call>` is answered by its result; a bare number ends the episode."""

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        turns = [self._turn(log[-1]["content"], state) for log, state in zip(message_log_batch, metadata, strict=True)]
        observations, states, stops, rewards, ended = zip(*turns, strict=True)
        return EnvironmentReturn(
            [{"role": "environment", "content": text} for text in observations],
            list(states),
            list(stops),
            torch.tensor(rewards),
            torch.tensor(ended),
        )

    def _turn(self, text: str, state: Any) -> tuple[str, Any, Any, float, bool]:
        if text.endswith("<call>"):
            left, right, operation = text[1 : -len("]<call>")].split(", ")
            result = {"sum": float.__add__, "prod": float.__mul__}[operation](float(left), float(right))
            return f"<result>{result:g}</result>", {**state, "steps": state["steps"] + 1}, ["<call>"], 0.0, False
        return "", None, None, float(float(text) == state["expected"]), True


@FACES
def test_a_tool_used_over_several_turns(run: Any) -> None:
    def policy(prompt: str, stops: Any) -> str:
        # (5 + 3) * 2 and (1 * 9) + 2, one operation a turn, each from the result before.
        assert stops == ["<call>"]
        first, second = ("[5, 3, sum]<call>", "[8, 2, prod]<call>") if "+ 3" in prompt else (
            "[1, 9, prod]<call>", "[9, 2, sum]<call>",
        )  # fmt: skip
        results = prompt.count("<result>")
        return (first, second, prompt.rpartition("<result>")[2].partition("<")[0])[results]

    batch = batch_of(
        {"expected": 16.0, "steps": 0},
        {"expected": 11.0, "steps": 0},
        prompts=["(5 + 3) * 2 = ", "(1 * 9) + 2 = "],
        stop_strings=[["<call>"], ["<call>"]],
    )
    final, metrics = roll(run, batch, FakePolicy(policy), Calculator(), max_rollout_turns=6)
    assert final["total_reward"].tolist() == [1.0, 1.0]
    for log, answer in zip(final["message_log"], ("16", "11"), strict=True):
        assert [role for role, _ in contents(log)] == ["user", *["assistant", "environment"] * 3]
        assert contents(log)[-2:] == [("assistant", answer), ("environment", "")]
    # None keeps the state that was.
    assert [state["steps"] for state in final["extra_env_info"]] == [2, 2]
    assert (metrics["avg_turns_per_sample"], metrics["natural_termination_rate"]) == (3.0, 1.0)


@FACES
def test_the_caller_s_batch_is_not_changed_and_shares_nothing(run: Any) -> None:
    batch = batch_of(
        {"turns": 2, "list": [1]},
        {"turns": 1, "list": [2]},
        stop_strings=[["a"], None],
        own=[{"x": [1]}, {"x": [2]}],
        idx=["row-a", "row-b"],
        length=torch.tensor([8, 8]),
    )
    batch["message_log"][0][0]["token_loss_mask"] = torch.ones(8)
    before = copy.deepcopy(batch)

    class Scribbler(CountingEnvironment):
        def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            for log, state in zip(message_log_batch, metadata, strict=True):
                log[0]["content"] = "scribble"
                log.append("scribble")
                state["list"].append("scribble")
            return super().step([log[:-1] for log in message_log_batch], metadata)

    final, _ = roll(run, batch, environment=Scribbler())
    assert same(batch, before)
    assert final["own"] == batch["own"]
    assert final["idx"] == ["row-a", "row-b"]
    assert final["stop_strings"] == [["a"], None]
    assert torch.equal(final["message_log"][0][0]["token_loss_mask"], torch.ones(8))
    final["own"][0]["x"].append("changed")
    final["message_log"][0][0]["token_ids"][0] = -1
    final["extra_env_info"][0]["list"].append("changed")
    final["loss_multiplier"][0] = 5
    final["length"][0] = 5
    assert same(batch, before)


@FACES
def test_states_that_an_environment_shares_are_apart_in_the_result(run: Any) -> None:
    class Sharing(CountingEnvironment):
        def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            return super().step(message_log_batch, metadata)._replace(metadata=[{"list": []}] * len(metadata))

    final, _ = roll(run, batch_of({"turns": 1}, {"turns": 1}), environment=Sharing())
    final["extra_env_info"][0]["list"].append(1)
    assert final["extra_env_info"][1] == {"list": []}


@FACES
def test_one_row_each_in_the_order_of_the_batch(run: Any) -> None:
    tasks = ["b", "a", "b", "b", "a"]
    batch = batch_of(*[{"turns": 1 + row % 3, "reward": float(row)} for row in range(5)], task_name=tasks)
    environments = {name: CountingEnvironment(f"from {name}") for name in "ab"}
    final, metrics = roll(run, batch, task_to_env=environments)
    assert final["task_name"] == tasks
    assert final["idx"] == [100, 101, 102, 103, 104]
    assert final["total_reward"].tolist() == [row * (1.0 + row % 3) for row in range(5)]
    for row, log in enumerate(final["message_log"]):
        assert contents(log)[0] == ("user", f"prompt {row}")
        assert {text for role, text in contents(log) if role == "environment"} == {f"from {tasks[row]}"}
    assert (metrics["total_turns"], metrics["max_turns_per_sample"]) == (9, 3)


def test_lockstep_is_one_call_for_each_turn_in_the_order_of_the_batch_off_the_loop() -> None:
    policy, environment = FakePolicy(lambda prompt, stops: "x"), CountingEnvironment("o")
    batch = batch_of(*[{"turns": 1 + row % 3} for row in range(6)], prompts=list("abcdef"))
    roll(run_multi_turn_rollout, batch, policy, environment, greedy=True)
    assert policy.calls == [list("abcdef"), ["bxo", "cxo", "exo", "fxo"], ["cxoxo", "fxoxo"]]
    assert environment.batches == [6, 4, 2]
    assert policy.greedy == [True] * 3
    assert threading.get_ident() not in policy.threads


def test_lockstep_with_several_tasks_is_one_call_for_each_task_and_turn() -> None:
    environments = {name: CountingEnvironment() for name in "ab"}
    policy = FakePolicy()
    batch = batch_of(*[{"turns": 2}] * 6, task_name=list("abbaab"))
    roll(run_multi_turn_rollout, batch, policy, task_to_env=environments)
    assert [environment.batches for environment in environments.values()] == [[3, 3], [3, 3]]
    assert [len(call) for call in policy.calls] == [6, 6]


def test_concurrent_is_a_batch_of_one_for_each_turn_of_a_sample() -> None:
    policy = FakePolicy()
    roll(run_async_multi_turn_rollout, batch_of({"turns": 2}, {"turns": 1}), policy, greedy=True)
    assert sorted(map(len, policy.calls)) == [1, 1, 1]
    assert policy.greedy == [True] * 3


def test_concurrent_samples_do_not_wait_for_each_other() -> None:
    # The second sample ends all its turns before the first one's first response is there.
    finished = asyncio.Event()

    class Slow(FakePolicy):
        async def generate_async(self, data: Any, greedy: bool = False) -> Any:
            (prompt,) = self._prompts(data)
            if prompt.startswith("slow"):
                await finished.wait()
            elif prompt.count("obs") == 2:
                finished.set()
            yield 0, self._output(data)

    final, _ = roll(
        run_async_multi_turn_rollout, batch_of({"turns": 1}, {"turns": 3}, prompts=["slow", "fast"]), Slow()
    )
    assert final["stop_reason"] == ["terminated", "terminated"]


@FACES
def test_stop_strings_are_per_sample_and_none_clears_them(run: Any) -> None:
    policy = FakePolicy(lambda prompt, stops: f"({stops})")
    batch = batch_of({"turns": 2, "stops": ["e"]}, {"turns": 2}, {"turns": 2}, stop_strings=[["d"], ["d"], "one"])
    final, _ = roll(run, batch, policy)
    responses = [[text for role, text in contents(log) if role == "assistant"] for log in final["message_log"]]
    assert responses == [["(['d'])", "(['e'])"], ["(['d'])", "(None)"], ["(['one'])", "(None)"]]


@FACES
def test_an_environment_s_stop_strings_reach_the_policy_where_the_dataset_has_none(run: Any) -> None:
    policy = FakePolicy()
    roll(run, batch_of({"turns": 2, "stops": ["e"]}), policy)
    assert policy.stops == [None, ["e"]]


@FACES
def test_the_window_is_kept(run: Any) -> None:
    final, metrics = roll(run, batch_of({"turns": 9}, prompts=["p" * 20]), max_seq_len=26)
    _, lengths = batched_message_log_to_flat_message(final["message_log"])
    assert lengths.tolist() == [26]
    last = final["message_log"][0][-1]
    # Ids are cut; the text is kept whole.
    assert (last["content"], len(last["token_ids"])) == ("obs", 1)
    assert (final["stop_reason"], final["truncated"].tolist()) == (["truncated"], [True])
    assert metrics["truncation_rate"] == 1.0


@FACES
@pytest.mark.parametrize(("window", "reason"), [(24, "truncated"), (25, "max_turns")])
def test_filling_the_window_exactly_is_truncation_although_nothing_is_cut(run: Any, window: int, reason: str) -> None:
    final, _ = roll(run, batch_of({"turns": 9}, prompts=["p" * 20]), max_seq_len=window, max_rollout_turns=1)
    assert [len(message["token_ids"]) for message in final["message_log"][0]] == [20, 1, 3]
    assert final["stop_reason"] == [reason]


@FACES
def test_an_observation_cut_after_the_end_does_not_matter(run: Any) -> None:
    final, metrics = roll(run, batch_of({"turns": 1}, prompts=["p" * 20]), max_seq_len=22)
    assert [len(message["token_ids"]) for message in final["message_log"][0]] == [20, 1, 1]
    assert (final["stop_reason"], metrics["truncation_rate"]) == (["terminated"], 0.0)


@FACES
def test_metadata_none_keeps_the_old_state_and_an_ended_episode_s_last_one_counts(run: Any) -> None:
    class Forgetful(CountingEnvironment):
        def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            returned = super().step(message_log_batch, metadata)
            # The last state is told where it is the end, and only there.
            kept = [state if over else None for state, over in zip(returned[1], returned[4], strict=True)]
            return returned._replace(metadata=[state if state and state["tell"] else None for state in kept])

    batch = batch_of({"turns": 1, "tell": True}, {"turns": 1, "tell": False}, {"turns": 2, "tell": False})
    final, _ = roll(run, batch, environment=Forgetful(), max_rollout_turns=3)
    assert [state["turns"] for state in final["extra_env_info"]] == [0, 1, 2]
    assert final["stop_reason"] == ["terminated", "terminated", "max_turns"]


@FACES
def test_environments_see_the_whole_log_in_every_turn(run: Any) -> None:
    environment = CountingEnvironment()
    roll(run, batch_of({"turns": 2}, prompts=["ab"]), environment=environment)
    first = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "x"}]
    second = [*first, {"role": "environment", "content": "obs"}, {"role": "assistant", "content": "x"}]
    assert environment.logs == [first, second]


@FACES
def test_every_metric_of_nemo_rl_is_there_and_the_endings_add_up(run: Any) -> None:
    # One ends, one reaches the limit of turns, one fills its window.
    batch = batch_of({"turns": 1}, {"turns": 9, "reward": 0.5}, {"turns": 9}, prompts=["p", "p", "p" * 20])
    _, metrics = roll(run, batch, max_seq_len=22, max_rollout_turns=2)
    expected = {
        "total_turns": 4,
        "avg_turns_per_sample": 4 / 3,
        "max_turns_per_sample": 2,
        "natural_termination_rate": 1 / 3,
        "truncation_rate": 1 / 3,
        "max_turns_reached_rate": 1 / 3,
        "mean_total_tokens_per_sample": (4 + 8 + 2) / 3,
        "mean_gen_tokens_per_sample": (1 + 2 + 1) / 3,
        "mean_env_tokens_per_sample": (3 + 6 + 1) / 3,
        "mean_total_reward": 1.0,
        "max_total_reward": 1.0,
        "min_total_reward": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


@FACES
def test_a_response_beyond_the_window_is_kept_whole_and_ends_its_sample(run: Any) -> None:
    policy = FakePolicy(lambda prompt, stops: "x" * 30)
    final, _ = roll(run, batch_of({"turns": 1}, prompts=["p" * 20]), policy, max_seq_len=26)
    assert [len(message["token_ids"]) for message in final["message_log"][0]] == [20, 30, 0]
    assert final["stop_reason"] == ["truncated"]
    assert final["total_reward"].tolist() == [1.0]


@FACES
@pytest.mark.parametrize("length", [26, 27])
def test_a_prompt_that_fills_the_window_is_not_sent(run: Any, length: int) -> None:
    policy = FakePolicy()
    batch = batch_of({"turns": 1}, {"turns": 1}, prompts=["p" * length, "p"])
    final, metrics = roll(run, batch, policy, max_seq_len=26)
    assert [prompt for call in policy.calls for prompt in call] == ["p"]
    assert final["stop_reason"] == ["truncated", "terminated"]
    assert len(final["message_log"][0]) == 1
    assert metrics["truncation_rate"] == 0.5


@FACES
def test_the_policy_s_word_on_truncation_counts(run: Any) -> None:
    policy = FakePolicy(lambda prompt, stops: "xyz" if "1" in prompt else "x", truncated=True, cut=2)
    final, metrics = roll(run, batch_of({"turns": 2}, {"turns": 2}), policy)
    assert final["stop_reason"] == ["terminated", "truncated"]
    assert final["truncated"].tolist() == [False, True]
    # The cut response was judged.
    assert final["total_reward"].tolist() == [2.0, 1.0]
    assert (metrics["natural_termination_rate"], metrics["truncation_rate"]) == (0.5, 0.5)


@FACES
def test_a_policy_that_says_that_a_response_fits_is_believed(run: Any) -> None:
    policy = FakePolicy(lambda prompt, stops: "x" * 6, truncated=True)
    final, _ = roll(run, batch_of({"turns": 1}, prompts=["p" * 20]), policy, max_seq_len=26)
    assert final["stop_reason"] == ["terminated"]
    silent = FakePolicy(lambda prompt, stops: "x" * 6)
    final, _ = roll(run, batch_of({"turns": 1}, prompts=["p" * 20]), silent, max_seq_len=26)
    assert final["stop_reason"] == ["truncated"]


@FACES
def test_turn_limits(run: Any) -> None:
    final, metrics = roll(run, batch_of({"turns": 2}, {"turns": 3}), max_rollout_turns=2)
    # Who ends in the last turn has ended.
    assert final["stop_reason"] == ["terminated", "max_turns"]
    assert (metrics["natural_termination_rate"], metrics["max_turns_reached_rate"]) == (0.5, 0.5)


@FACES
def test_no_limit_of_turns(run: Any) -> None:
    final, _ = roll(run, batch_of({"turns": 12}), max_rollout_turns=None)
    assert (final["stop_reason"], final["total_reward"].tolist()) == (["terminated"], [12.0])


@FACES
def test_no_turns_leave_the_prompts(run: Any) -> None:
    policy, environment = FakePolicy(), CountingEnvironment()
    final, metrics = roll(run, batch_of({"turns": 2}, {"turns": 1}), policy, environment, max_rollout_turns=0)
    assert (policy.calls, environment.batches) == ([], [])
    assert [len(log) for log in final["message_log"]] == [1, 1]
    assert final["total_reward"].tolist() == [0.0, 0.0]
    assert final["stop_reason"] == ["max_turns", "max_turns"]
    assert metrics["max_turns_reached_rate"] == 1.0


@FACES
def test_no_samples(run: Any) -> None:
    final, metrics = roll(run, batch_of(own=[]))
    assert (final["message_log"], final["stop_reason"], final["own"], final.size) == ([], [], [], 0)
    assert (final["total_reward"].shape, final["total_reward"].dtype) == ((0,), torch.float32)
    assert metrics["total_turns"] == 0
    assert math.isnan(metrics["mean_total_reward"])


@FACES
def test_empty_observations_and_responses_are_messages_of_int_ids(run: Any) -> None:
    policy = FakePolicy(lambda prompt, stops: "")
    final, metrics = roll(run, batch_of({"turns": 2, "say": ""}), policy)
    (log,) = final["message_log"]
    assert [role for role, _ in contents(log)] == ["user", *["assistant", "environment"] * 2]
    for message in log[1:]:
        assert (message["token_ids"].shape, message["token_ids"].dtype) == ((0,), torch.int64)
        assert ("generation_logprobs" in message) == (message["role"] == "assistant")
    assert metrics["mean_total_tokens_per_sample"] == 0.0
    assert policy.calls == [["prompt 0"]] * 2


@FACES
def test_without_logprobs_messages_have_none(run: Any) -> None:
    final, _ = roll(run, batch_of({"turns": 1}), FakePolicy(lambda prompt, stops: "", logprobs=False))
    assert set(final["message_log"][0][1]) == {"role", "content", "token_ids"}


@FACES
def test_rewards_are_summed_in_float32(run: Any) -> None:
    final, _ = roll(run, batch_of({"turns": 3, "reward": 0.1}))
    expected = torch.tensor(0.1) + torch.tensor(0.1) + torch.tensor(0.1)
    assert final["total_reward"][0] == expected


@FACES
def test_named_rewards_are_columns(run: Any) -> None:
    class Named(CountingEnvironment):
        def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            size = len(metadata)
            parts = {"right": torch.ones(size), "short": [0.25] * size}
            return super().step(message_log_batch, metadata)._replace(rewards=parts)

    batch = batch_of({"turns": 2}, {"turns": 1}, {"turns": 1}, task_name=["named", "named", "plain"])
    final, _ = roll(run, batch, task_to_env={"named": Named(), "plain": CountingEnvironment()})
    assert final["reward/right"].tolist() == [2.0, 1.0, 0.0]
    assert final["reward/short"].tolist() == [0.5, 0.25, 0.0]
    assert final["total_reward"].tolist() == [2.5, 1.25, 1.0]


@FACES
def test_names_that_nemo_rl_s_environments_give_are_the_columns(run: Any) -> None:
    class Named(CountingEnvironment):
        def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            parts = {"reward/correctness": torch.ones(len(metadata)), "reward/format": torch.zeros(len(metadata))}
            return super().step(message_log_batch, metadata)._replace(rewards=parts)

    final, _ = roll(run, batch_of({"turns": 2}), environment=Named())
    assert [name for name in final if name.startswith("reward/")] == ["reward/correctness", "reward/format"]
    assert final["reward/correctness"].tolist() == [2.0]


@FACES
def test_metrics_are_numbers_that_any_logger_takes(run: Any) -> None:
    for batch in (batch_of({"turns": 2}), batch_of()):
        _, metrics = roll(run, batch)
        assert {name: value for name, value in metrics.items() if type(value) not in (int, float)} == {}


@FACES
def test_histograms_and_the_longest_turns(run: Any) -> None:
    answers = {"pq": "abc", "pqabcobs": "d", "xyz": "ef"}
    batch = batch_of({"turns": 2}, {"turns": 1}, prompts=["pq", "xyz"])
    policy = FakePolicy(lambda prompt, stops: answers[prompt])
    _, metrics = roll(run, batch, policy, histograms=True)
    assert metrics["histogram/gen_tokens_length"] == [3, 1, 2]
    assert metrics["histogram/input_tokens_length"] == [2, 8, 3]
    assert metrics["histogram/total_tokens_length"] == [5, 9, 5]
    assert [metrics[f"max_gen_tokens_per_turn/{part}"] for part in ("max", "mean", "p95")] == [3, 2.5, 3]
    _, empty = roll(run, batch_of(), histograms=True)
    assert empty["histogram/gen_tokens_length"] == []
    assert math.isnan(empty["max_gen_tokens_per_turn/mean"])


@FACES
def test_histograms_are_there_where_nemo_rl_s_loggers_take_them(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("nemo_rl.utils.logger")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for methods, expected in (({"log_metrics": print}, False), ({"log_histogram": print}, True)):
        monkeypatch.setattr(module, "Logger", type("Logger", (), methods), raising=False)
        _, metrics = roll(run, batch_of({"turns": 1}))
        assert ("histogram/gen_tokens_length" in metrics) is expected


@FACES
def test_a_matrix_of_rewards_is_columns_too(run: Any) -> None:
    class Matrix(CountingEnvironment):
        def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            return super().step(message_log_batch, metadata)._replace(rewards=torch.tensor([[1.0, 0.5]]))

    final, _ = roll(run, batch_of({"turns": 1}), environment=Matrix())
    assert [final[name].tolist() for name in ("reward1", "reward2", "total_reward")] == [[1.0], [0.5], [1.5]]


@FACES
def test_unknown_tasks_are_refused_before_anything_runs(run: Any) -> None:
    policy, environment = FakePolicy(), CountingEnvironment()
    batch = batch_of({"turns": 1}, {"turns": 1}, task_name=["env", "chess"])
    with pytest.raises(ValueError, match="No environment found for task type: chess"):
        roll(run, batch, policy, environment)
    assert (policy.calls, environment.batches) == ([], [])


@FACES
@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": "x"}, r"message_log\[0\]\[0\]: token_ids are missing"),
        (
            {"role": "user", "content": "x", "token_ids": torch.tensor([0.5])},
            r"message_log\[0\]\[0\]: token ids must be",
        ),
        ({"role": "user", "content": "x", "token_ids": torch.tensor([2**40])}, r"message_log\[0\]\[0\]: "),
    ],
)
def test_rows_without_proper_ids_are_refused(run: Any, message: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        roll(run, batch_of({"turns": 1}, message_log=[[message]]))


@FACES
def test_what_is_not_text_is_refused_and_not_ignored(run: Any) -> None:
    with pytest.raises(ValueError, match="only text can be rolled out"):
        roll(run, batch_of({"turns": 1}, vllm_images=[["an image"]]))
    final, _ = roll(run, batch_of({"turns": 1}, vllm_images=[[]], vllm_content=[None]))
    assert final["vllm_images"] == [[]]

    class PackedTensor:
        """Named as NeMo RL's class for images."""

    for extra in ({"pixel_values": PackedTensor()}, {"vllm_videos": ["a video"]}):
        log = [{"role": "user", "content": "x", "token_ids": ids_of("x"), **extra}]
        with pytest.raises(ValueError, match=rf"message_log\[0\]\[0\]\.{next(iter(extra))}: only text"):
            roll(run, batch_of({"turns": 1}, message_log=[log]))


async def test_one_sample_that_is_not_text_is_refused() -> None:
    state: dict[str, Any] = {"message_log": [], "extra_env_info": None, "task_name": "env", "vllm_content": "an image"}
    with pytest.raises(ValueError, match=r"vllm_content\[3\]: only text"):
        await run_sample_multi_turn_rollout(
            3, state, FakePolicy(), CharacterTokenizer(), {"env": CountingEnvironment()}, 100
        )


@FACES
def test_further_keys_of_a_prompt_s_messages_are_kept(run: Any) -> None:
    batch = batch_of({"turns": 1}, prompts=["ab"])
    batch["message_log"][0][0]["token_loss_mask"] = torch.zeros(2)
    final, _ = roll(run, batch)
    assert final["message_log"][0][0]["token_loss_mask"].tolist() == [0.0, 0.0]


@FACES
def test_batches_are_of_the_caller_s_class(run: Any) -> None:
    class Theirs(BatchedDataDict[Any]):
        pass

    seen: set[type] = set()

    class Policy(FakePolicy):
        def _seen(self, data: Any, greedy: bool) -> None:
            seen.add(type(data))

    final, _ = roll(run, Theirs(batch_of({"turns": 1})), Policy())
    assert type(final) is Theirs
    assert seen == {Theirs}
    plain, _ = roll(run, dict(batch_of({"turns": 1})))
    assert type(plain) is BatchedDataDict


@FACES
async def test_it_works_where_a_loop_runs(run: Any) -> None:
    final, _ = roll(run, batch_of({"turns": 2}))
    assert final["total_reward"].tolist() == [2.0]


@FACES
def test_the_policy_believes_itself_in_the_caller_s_thread(run: Any) -> None:
    gradients: set[bool] = set()

    class Watching(FakePolicy):
        def _seen(self, data: Any, greedy: bool) -> None:
            gradients.add(torch.is_grad_enabled())

    with torch.no_grad():
        roll(run, batch_of({"turns": 1}), Watching())
    assert gradients == {False}


def test_concurrency_can_be_bounded() -> None:
    class Watching(FakePolicy):
        now = most = 0

        async def generate_async(self, data: Any, greedy: bool = False) -> Any:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            yield 0, self._output(data)
            self.now -= 1

    for bound, most in ((None, 6), (2, 2)):
        policy = Watching()
        roll(
            run_async_multi_turn_rollout, batch_of(*[{"turns": 1}] * 6), policy, limits=RolloutLimits(concurrency=bound)
        )
        assert policy.most == most


async def test_one_sample() -> None:
    batch = batch_of({"turns": 2, "stops": ["e"]}, prompts=["ab"], stop_strings=[["d"]])
    state = {name: batch[name][0] for name in batch}
    before = copy.deepcopy(state)
    policy = FakePolicy(lambda prompt, stops: "xyz")
    final, metrics = await run_sample_multi_turn_rollout(
        7, state, policy, CharacterTokenizer(), {"env": CountingEnvironment()}, 100, greedy=True
    )
    assert same(state, before)
    assert [role for role, _ in contents(final["message_log"])] == ["user", *["assistant", "environment"] * 2]
    assert (final["total_reward"].shape, final["total_reward"].dtype) == ((), torch.float32)
    assert (final["idx"], final["task_name"], final["stop_strings"]) == (100, "env", ["e"])
    assert final["extra_env_info"] == {"turns": 0, "stops": ["e"]}
    assert final["stop_reason"] == "terminated"
    assert metrics == {
        "turn_count": 2,
        "total_tokens": 12,
        "assistant_tokens": 6,
        "env_tokens": 6,
        "terminated": True,
        "truncated": False,
        "max_turns_reached": False,
        "total_reward": 2.0,
        "turn_gen_tokens": [3, 3],
        "turn_input_tokens": [2, 8],
        "turn_total_tokens": [5, 11],
        "max_gen_tokens_per_turn": 3,
    }
    assert policy.greedy == [True, True]


@pytest.mark.parametrize(
    ("window", "turns", "ended"), [(100, 9, "terminated"), (8, 9, "truncated"), (100, 1, "max_turns_reached")]
)
async def test_one_sample_s_end_is_one_of_three(window: int, turns: int, ended: str) -> None:
    batch = batch_of({"turns": 2}, prompts=["ab"])
    _, metrics = await run_sample_multi_turn_rollout(
        0,
        {name: batch[name][0] for name in batch},
        FakePolicy(lambda prompt, stops: "xyz"),
        CharacterTokenizer(),
        {"env": CountingEnvironment()},
        window,
        max_rollout_turns=turns,
    )
    ways = ("terminated", "truncated", "max_turns_reached")
    assert {name: metrics[name] for name in ways} == {name: name == ended for name in ways}


async def test_one_sample_s_named_rewards() -> None:
    class Named(CountingEnvironment):
        def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            return super().step(message_log_batch, metadata)._replace(rewards={"right": [1.0], "short": [0.25]})

    batch = batch_of({"turns": 2})
    final, _ = await run_sample_multi_turn_rollout(
        0, {name: batch[name][0] for name in batch}, FakePolicy(), CharacterTokenizer(), {"env": Named()}, 100
    )
    assert [final[name].item() for name in ("reward/right", "reward/short", "total_reward")] == [2.0, 0.5, 2.5]


async def test_one_sample_without_turns_and_without_an_index() -> None:
    state = {"message_log": batch_of({})["message_log"][0], "extra_env_info": None, "task_name": "env"}
    final, metrics = await run_sample_multi_turn_rollout(
        7, state, FakePolicy(), CharacterTokenizer(), {"env": CountingEnvironment()}, 100, max_rollout_turns=0
    )
    assert (final["idx"], final["stop_reason"], final["stop_strings"]) == (7, "max_turns", None)
    assert (metrics["turn_count"], metrics["turn_gen_tokens"]) == (0, [])
    with pytest.raises(ValueError, match="No environment found for task type: env"):
        await run_sample_multi_turn_rollout(7, state, FakePolicy(), CharacterTokenizer(), {}, 100)


def test_asynchronous_generation_must_be_enabled() -> None:
    policy: Any = FakePolicy()
    policy.cfg = {"vllm_cfg": {"async_engine": False}}
    with pytest.raises(AssertionError, match="Async generation is not enabled"):
        roll(run_async_multi_turn_rollout, batch_of({"turns": 1}), policy)
    roll(run_multi_turn_rollout, batch_of({"turns": 1}), policy)


async def test_one_sample_of_one_turn_has_its_turn() -> None:
    batch = batch_of({"turns": 2}, prompts=["ab"])
    final, metrics = await run_sample_multi_turn_rollout(
        0,
        {name: batch[name][0] for name in batch},
        FakePolicy(),
        CharacterTokenizer(),
        {"env": CountingEnvironment()},
        100,
        max_rollout_turns=1,
    )
    assert (metrics["turn_count"], final["total_reward"].item()) == (1, 1.0)


@pytest.mark.parametrize("runs", [run_multi_turn_rollout, run_async_multi_turn_rollout])
def test_states_may_be_any_objects(runs: Any) -> None:
    class Board:
        moves = 0

    class Playing:
        def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            for state in metadata:
                state["board"].moves += 1
            size = len(metadata)
            return EnvironmentReturn(
                [{"role": "environment", "content": "o"}] * size, metadata, [None] * size, [1.0] * size, [True] * size
            )

    board = Board()
    final, _ = runs(
        FakePolicy(), batch_of({"board": board}), CharacterTokenizer(), {"env": Playing()}, 100, max_rollout_turns=3
    )
    assert final["extra_env_info"][0]["board"].moves == 1


async def test_groups_are_those_of_the_batch_with_their_own_metrics() -> None:
    batch = batch_of(*({"turns": turns} for turns in (1, 1, 2, 3, 1, 1)), prompts=list("aabbcc"))
    whole, _ = await asyncio.to_thread(roll, run_async_multi_turn_rollout, copy.deepcopy(batch))
    groups = [group async for group in roll(run_async_multi_turn_rollout_groups, batch, num_generations=2)]
    assert [group.group_index for group in groups] == [0, 1, 2]
    assert [group.task_index for group in groups] == [None] * 3
    assert [group.rollout_metrics["total_turns"] for group in groups] == [2, 5, 2]
    for number, group in enumerate(groups):
        assert isinstance(group.final_batch, BatchedDataDict)
        assert same(group.final_batch, whole.slice(2 * number, 2 * number + 2))


@pytest.mark.parametrize(("size", "number"), [(3, 2), (2, 0), (2, -1)])
async def test_a_batch_that_has_no_whole_groups_calls_nothing(size: int, number: int) -> None:
    policy = FakePolicy()
    batch = batch_of(*({"turns": 1} for _ in range(size)), prompts=["a"] * size)
    groups = roll(run_async_multi_turn_rollout_groups, batch, policy, num_generations=number)
    with pytest.raises(ValueError, match="num_generations"):
        await anext(groups)
    assert policy.calls == []
