from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from kuberoll_workers.adapters.gymnasium import GymnasiumEnvironment, text_of
from kuberoll_workers.environments import Episode, EpisodeEnd, UnusableEnvironment, UnusableRow
from tests.adapters.libraries.support import ISOLATIONS, assert_needs_its_extra, run
from tests.environments.support import step_one

WAYS = {"left": 0, "down": 1, "right": 2, "up": 3}
LAKE = {
    "id": "FrozenLake-v1",
    "parameters": {"is_slippery": False},
    "observation": "render",
    "actions": WAYS,
}
# SFFF FHFH FFFH HFFG
SOLUTION = ["down", "down", "right", "right", "down", "right"]
HOLE = ["down", "right"]


class Echo(gymnasium.Env[Any, Any]):  # type: ignore[misc]
    """Accepts arrays; its third step is the limit."""

    closed = 0

    def __init__(self, space: spaces.Space[Any] | None = None) -> None:
        self.action_space = space or spaces.Box(-1.0, 1.0, (2,))
        self.observation_space = spaces.Text(100, charset=string.printable)
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return f"{self.np_random.integers(1000)} {options}", {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return text_of(action), 0.5, False, self.count == 3, {}

    def close(self) -> None:
        Echo.closed += 1


gymnasium.register("Echo-v0", entry_point=Echo)
gymnasium.register("Pair-v0", entry_point=lambda: Echo(spaces.Tuple([spaces.Discrete(2), spaces.Box(0.0, 1.0, (1,))])))


def first_half(observation: Any, environment: Any) -> str:
    return f"half of {environment.spec.id}: {observation[: len(observation) // 2]}"


def by_letter(text: str, environment: Any) -> list[float]:
    if text != "a":
        raise ValueError("the only letter is a")
    return [0.5, 0.5]


def episode(name: str = "0-0-0", seed: int = 5, metadata: Any = None) -> Episode:
    return Episode(id=name, messages=[], metadata=metadata, seed=seed, max_turns=10)


def play(environment: GymnasiumEnvironment, actions: list[str], **changes: Any) -> list[Any]:
    """Results of the actions in an episode."""
    (start,) = environment.reset([episode(**changes)])
    assert start is not None
    state, results = start.metadata, []
    for action in actions:
        results.append(step_one(environment, f"<action>{action}</action>", state))
        (state,) = results[-1].metadata
    environment.close([EpisodeEnd(id="0-0-0", metadata=state, reason="terminated")])
    return results


@pytest.mark.parametrize(("actions", "reward"), [(SOLUTION, 1.0), (HOLE, 0.0)])
def test_rewards_and_ends_are_those_of_gymnasium(actions: list[str], reward: float) -> None:
    results = play(GymnasiumEnvironment(LAKE), actions)
    assert [list(result.terminateds) for result in results] == [[False]] * (len(actions) - 1) + [[True]]
    assert [result.rewards[0] for result in results] == [0.0] * (len(actions) - 1) + [reward]
    assert results[-1].metadata[0] == {"steps": len(actions), "outcome": "terminated", "episode": "0-0-0"}
    assert results[-1].next_stop_strings == [None]
    assert results[0].next_stop_strings == [["</action>"]]


def test_the_policy_sees_what_gymnasium_renders() -> None:
    environment = GymnasiumEnvironment(LAKE)
    (start,) = environment.reset([episode()])
    assert start is not None
    assert start.messages == [{"role": "user", "content": "SFFF\nFHFH\nFFFH\nHFFG\n"}]
    assert start.stop_strings == ("</action>",)
    assert "(Down)" in step_one(environment, "<action>DOWN</action>", start.metadata).observations[0]["content"]


def test_gymnasiums_own_limit_ends_the_episode() -> None:
    results = play(GymnasiumEnvironment({"id": "Echo-v0"}), ["[0, 1]", "[0.25, -1]", "[0, 0]"])
    assert [result.observations[0]["content"] for result in results[:2]] == ["\n[0.0, 1.0]\n", "\n[0.25, -1.0]\n"]
    assert list(results[-1].terminateds) == [True]
    assert results[-1].metadata[0]["outcome"] == "truncated"


@pytest.mark.parametrize(
    ("config", "reply", "note"),
    [
        (LAKE, "go down", "No action was found; write one"),
        (LAKE, "<action>fly</action>", "'fly' is no action: the actions are left, down, right, up."),
        (LAKE, "<action>1</action>", "'1' is no action: the actions are"),
        ({"id": "FrozenLake-v1"}, "<action>4</action>", "'4' is no action of Discrete(4)"),
        ({"id": "FrozenLake-v1"}, "<action>true</action>", "'true' is no action of Discrete(4)"),
        ({"id": "FrozenLake-v1"}, "<action>1.5</action>", "'1.5' is no action of Discrete(4)"),
        ({"id": "FrozenLake-v1"}, "<action>left</action>", "'left' is no action: an action is a value of Discrete(4)"),
        ({"id": "FrozenLake-v1"}, f"<action>{'[' * 20_000}</action>", "is no action"),
        ({"id": "Echo-v0"}, "<action>[0, 9]</action>", "'[0, 9]' is no action of Box"),
        ({"id": "Echo-v0"}, '<action>[0, "a"]</action>', "is no action of Box"),
        ({"id": "Echo-v0"}, "<action>[[0], 1]</action>", "is no action of Box"),
        ({"id": "Echo-v0"}, "<action>[0, NaN]</action>", "an action is a value of Box"),
        ({"id": "Echo-v0", "actions": f"{__name__}:by_letter"}, "<action>b</action>", "the only letter is a"),
    ],
)
def test_what_is_no_action_is_an_observation(config: dict[str, Any], reply: str, note: str) -> None:
    environment = GymnasiumEnvironment({**config, "unreadableReward": -0.25})
    (start,) = environment.reset([episode()])
    assert start is not None
    result = step_one(environment, reply, start.metadata)
    assert note in result.observations[0]["content"]
    assert (list(result.rewards), list(result.terminateds)) == ([-0.25], [False])
    assert result.metadata == [start.metadata]
    environment.shutdown()


def test_functions_by_name_and_spaces_of_parts() -> None:
    config = {"id": "Echo-v0", "observation": f"{__name__}:first_half", "actions": f"{__name__}:by_letter"}
    (result,) = play(GymnasiumEnvironment(config), ["a"])
    assert result.observations[0]["content"] == "\nhalf of Echo-v0: [0.5,\n"
    (result,) = play(GymnasiumEnvironment({"id": "Pair-v0"}), ["[1, [0.5]]"])
    assert result.observations[0]["content"] == "\n(1, [0.5])\n"


def test_the_seed_determines_the_episode() -> None:
    environment = GymnasiumEnvironment({"id": "Echo-v0"})

    def first(**changes: Any) -> Any:
        (start,) = environment.reset([episode(**changes)])
        assert start is not None
        return start.messages

    assert first(seed=2**62) == first(seed=2**62) != first(seed=3)
    assert first(seed=1, metadata={"seed": 9}) == first(seed=2, metadata={"seed": 9})
    assert first(metadata={"options": {"hard": True}})[0]["content"].endswith("{'hard': True}\n")


def test_each_environment_is_closed_once() -> None:
    environment = GymnasiumEnvironment({"id": "Echo-v0"})
    before = Echo.closed
    environment.reset([episode("a"), episode("b")])
    environment.reset([episode("a")])
    assert Echo.closed == before + 1
    end = EpisodeEnd(id="a", metadata=None, reason="failed")
    environment.close([end])
    environment.close([end])
    assert Echo.closed == before + 2
    environment.shutdown()
    assert Echo.closed == before + 3


def test_observations_are_texts() -> None:
    import numpy

    assert text_of("as it is") == "as it is"
    assert text_of({"a": numpy.float32(0.1), "b": (numpy.int64(3), [1])}) == "{'a': 0.1, 'b': (3, [1])}"
    assert text_of(numpy.array([[0.1, 2.0]], dtype=numpy.float32)) == "[[0.1, 2.0]]"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.id: "),
        ({"id": "NoSuchLake-v1"}, "config.id: NoSuchLake-v1 cannot be made: "),
        ({"id": "no_module:Lake-v1"}, "config.id: no_module:Lake-v1 cannot be made: "),
        ({"id": "FrozenLake-v1", "parameters": {"sise": 1}}, "config.id: FrozenLake-v1 cannot be made: "),
        ({"id": "LunarLander-v3"}, "config.id: LunarLander-v3 needs a further package: "),
        ({"id": "FrozenLake-v1", "actions": {"fly": 4}}, "config.actions.fly: 4 is no action of Discrete(4)"),
        ({"id": "FrozenLake-v1", "actions": "no_module:act"}, "config.actions: no_module:act cannot be imported"),
        ({"id": "FrozenLake-v1", "observation": "show"}, "config.observation: show cannot be imported"),
    ],
)
def test_a_wrong_config_names_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableEnvironment) as caught:
        GymnasiumEnvironment(config)
    assert message in str(caught.value)


@pytest.mark.parametrize("metadata", [{"seed": -1}, {"seed": True}, {"seed": 2**31}, {"options": 3}])
def test_wrong_rows_are_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(UnusableRow, match=r"metadata\.[a-z]+: found"):
        GymnasiumEnvironment(LAKE).reset([episode(metadata=metadata)])


def test_a_machine_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_needs_its_extra(monkeypatch, "gymnasium", "gymnasium", "gymnasium", LAKE)


@pytest.mark.processes
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_run(tmp_path: Path, isolation: str) -> None:
    records = run(
        tmp_path,
        {"name": "lake", "type": "gymnasium", "config": LAKE, "isolation": isolation},
        [*(f"<action>{way}</action>" for way in [*WAYS, "right", "down"]), "swim"],
    )
    assert len(records) == 32
    for record in records:
        assert record.metadata is not None
        assert record.messages[1].content == "SFFF\nFHFH\nFFFH\nHFFG\n"
        if record.stop_reason == "terminated":
            board = record.messages[-1].content
            assert record.metadata["outcome"] == "terminated"
            assert record.total_reward in (0.0, 1.0), board
        else:
            assert record.stop_reason == "max_turns"
            assert record.total_reward == 0.0
    assert "terminated" in {record.stop_reason for record in records}
