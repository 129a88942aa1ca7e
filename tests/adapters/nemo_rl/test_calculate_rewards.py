"""calculate_rewards: one call for each task, results in the order of the batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kuberoll_workers.adapters.nemo_rl import RolloutLimits, calculate_rewards
from kuberoll_workers.environments import EnvironmentReturn
from kuberoll_workers.environments.outcome import StepInvalid, StepRaised, StepTimedOut
from tests.adapters.nemo_rl.fakes import batch_of
from tests.environments.ray_actors import Renewed, actor_pool


class Judge(Renewed):
    """Gives the rewards that it was made with, and counts its calls."""

    def __init__(self, rewards: Any, *, fields: int = 5) -> None:
        self._rewards = rewards
        self._fields = fields
        self.calls = 0
        self.logs: list[Any] = []

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> Any:
        self.calls += 1
        self.logs.extend(message_log_batch)
        size = len(message_log_batch)
        returned: tuple[Any, ...] = (
            [{"role": "environment", "content": "observation"}] * size,
            [{"seen": state} for state in metadata],
            [[]] * size,
            self._rewards,
            [True] * size,
            [None] * size,
        )
        return returned[: self._fields]

    def count(self) -> int:
        return self.calls


@pytest.fixture(scope="module")
def judges(ray: Any) -> Iterator[Callable[[], Any]]:
    with actor_pool(ray, Judge) as maker:
        yield maker


@pytest.fixture(params=["object", pytest.param("actor", marks=pytest.mark.ray)])
def make(request: pytest.FixtureRequest) -> Any:
    """Makes environments, as objects or as Ray actors; and says how often one was called."""
    if request.param == "object":
        return lambda *args, **more: Judge(*args, **more), lambda environment: environment.calls
    ray, judges = request.getfixturevalue("ray"), request.getfixturevalue("judges")
    return judges(), lambda environment: ray.get(environment.count.remote())


def test_one_task_is_one_call(make: Any) -> None:
    actor, calls = make
    environment = actor([1.0, 2.0])
    returned = calculate_rewards(batch_of({"n": 1}, {"n": 2}), {"env": environment})
    observations, metadata, stops, rewards, terminateds = returned
    assert rewards.tolist() == [1.0, 2.0]
    assert (rewards.dtype, terminateds.dtype) == (torch.float32, torch.bool)
    assert metadata == [{"seen": {"n": 1}}, {"seen": {"n": 2}}]
    assert [len(observations), len(stops), len(terminateds)] == [2, 2, 2]
    assert calls(environment) == 1


def test_several_tasks_are_a_call_each_in_the_order_of_the_batch(make: Any) -> None:
    actor, calls = make
    environments = {"math": actor([1.0, 2.0], fields=6), "code": actor([3.0, 4.0])}
    batch = batch_of(*[{"n": row} for row in range(4)], task_name=["code", "math", "code", "math"])
    # Six elements where an environment returned six.
    _, metadata, _, rewards, _, answers = calculate_rewards(batch, environments)
    assert rewards.tolist() == [3.0, 1.0, 4.0, 2.0]
    assert [state["seen"]["n"] for state in metadata] == [0, 1, 2, 3]
    assert answers == [None] * 4
    assert [calls(environment) for environment in environments.values()] == [1, 1]


def test_an_empty_batch_calls_nobody(make: Any) -> None:
    actor, calls = make
    environment = actor([])
    observations, metadata, stops, rewards, terminateds = calculate_rewards(batch_of(), {"env": environment})
    assert [len(column) for column in (observations, metadata, stops, rewards, terminateds)] == [0] * 5
    assert (rewards.dtype, terminateds.dtype) == (torch.float32, torch.bool)
    assert calls(environment) == 0


def test_an_unknown_task_is_refused_before_anything_is_called() -> None:
    environment = Judge([1.0])
    batch = batch_of({}, {}, task_name=["env", "unknown_task"])
    with pytest.raises(ValueError, match="No environment found for task type: unknown_task"):
        calculate_rewards(batch, {"env": environment})
    assert environment.calls == 0


def test_environments_see_roles_and_contents() -> None:
    environment = Judge([1.0])
    calculate_rewards(batch_of({}, prompts=["ab"]), {"env": environment})
    assert environment.logs == [[{"role": "user", "content": "ab"}]]


def test_an_environment_in_this_process_cannot_change_the_caller_s_batch() -> None:
    class Careless(Judge):
        def step(self, message_log_batch: list[Any], metadata: list[Any]) -> Any:
            metadata[0]["moves"].append("up")
            message_log_batch[0].clear()
            return super().step(message_log_batch, metadata)

    batch = batch_of({"moves": []})
    returned = calculate_rewards(batch, {"env": Careless([1.0])})
    assert returned.metadata == [{"seen": {"moves": ["up"]}}]
    assert batch["extra_env_info"] == [{"moves": []}]
    assert [message["role"] for message in batch["message_log"][0]] == ["user"]


def test_tasks_may_share_an_environment() -> None:
    environment = Judge([1.0])
    batch = batch_of({}, {}, task_name=["one", "other"])
    assert calculate_rewards(batch, {"one": environment, "other": environment}).rewards.tolist() == [1.0, 1.0]
    assert environment.calls == 2


def test_coroutine_environments_and_running_loops() -> None:
    class Coroutine:
        async def step(self, logs: Any, metadata: Any) -> Any:
            return Judge([1.0] * len(logs)).step(logs, metadata)

    assert calculate_rewards(batch_of({}, {}), {"env": Coroutine()}).rewards.tolist() == [1.0, 1.0]


async def test_it_works_where_a_loop_runs() -> None:
    assert calculate_rewards(batch_of({}), {"env": Judge([1.0])}).rewards.tolist() == [1.0]


def test_named_rewards() -> None:
    named = Judge({"right": [1.0], "short": [0.5]})
    rewards = calculate_rewards(batch_of({}), {"env": named}).rewards
    assert {name: values.tolist() for name, values in rewards.items()} == {"right": [1.0], "short": [0.5]}
    mixed = batch_of({}, {}, task_name=["named", "plain"])
    with pytest.raises(ValueError, match="name different rewards, or some none"):
        calculate_rewards(mixed, {"named": named, "plain": Judge([1.0])})


def test_stop_strings_and_metadata_may_be_none_as_a_whole() -> None:
    class Terse:
        def step(self, logs: Any, metadata: Any) -> Any:
            return EnvironmentReturn([{"role": "environment", "content": ""}], None, None, [1.0], [False])

    returned = calculate_rewards(batch_of({}), {"env": Terse()})
    assert (returned.metadata, returned.next_stop_strings) == ([None], [None])


def test_lengths_are_checked() -> None:
    with pytest.raises(StepInvalid, match="rewards has 1 elements for 2 trajectories"):
        calculate_rewards(batch_of({}, {}), {"env": Judge([1.0])})


def test_an_environment_s_exception_is_raised_when_all_others_have_ended() -> None:
    class Broken:
        def step(self, logs: Any, metadata: Any) -> Any:
            raise ZeroDivisionError("no judge")

    other = Judge([1.0])
    batch = batch_of({}, {}, task_name=["broken", "fine"])
    with pytest.raises(StepRaised, match="ZeroDivisionError: no judge") as caught:
        calculate_rewards(batch, {"broken": Broken(), "fine": other})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert other.calls == 1


def test_a_hanging_environment_is_a_failure() -> None:
    release = threading.Event()

    class Hanging:
        def step(self, logs: Any, metadata: Any) -> Any:
            release.wait()

    try:
        with pytest.raises(StepTimedOut):
            calculate_rewards(batch_of({}), {"env": Hanging()}, limits=RolloutLimits(step_seconds=0.05))
    finally:
        release.set()


def test_the_whole_of_what_environments_return_is_in_the_order_of_the_batch() -> None:
    class Speaking:
        def __init__(self, name: str) -> None:
            self.name = name

        def step(self, logs: Any, metadata: Any) -> Any:
            size = range(len(logs))
            return EnvironmentReturn(
                observations=[{"role": "tool", "content": f"{self.name} {state['n']}"} for state in metadata],
                metadata=[state if state["n"] else None for state in metadata],
                next_stop_strings=[[self.name, "."] if n else None for n in size],
                rewards=[{"a": 0.25, "b": 0.5}[self.name] for _ in size],
                terminateds=[self.name == "b" for _ in size],
                answers=[f"answer {state['n']}" for state in metadata] if self.name == "b" else None,
            )

    environments = {"a": Speaking("a"), "b": Speaking("b")}
    returned = calculate_rewards(batch_of(*[{"n": n} for n in range(4)], task_name=["a", "b", "b", "a"]), environments)
    assert returned.observations == [{"role": "tool", "content": text} for text in ("a 0", "b 1", "b 2", "a 3")]
    assert returned.metadata == [None, {"n": 1}, {"n": 2}, {"n": 3}]
    assert returned.next_stop_strings == [None, None, ["b", "."], ["a", "."]]
    assert returned.rewards.tolist() == [0.25, 0.5, 0.5, 0.25]
    assert returned.terminateds.tolist() == [False, True, True, False]
    assert returned.answers == [None, "answer 1", "answer 2", None]


def test_named_rewards_may_come_in_any_order() -> None:
    one, other = Judge({"right": [1.0], "short": [0.5]}), Judge({"short": [0.25], "right": [2.0]})
    batch = batch_of({}, {}, task_name=["one", "other"])
    rewards = calculate_rewards(batch, {"one": one, "other": other}).rewards
    assert {name: values.tolist() for name, values in rewards.items()} == {"right": [1.0, 2.0], "short": [0.5, 0.25]}
    assert {values.dtype for values in rewards.values()} == {torch.float32}
