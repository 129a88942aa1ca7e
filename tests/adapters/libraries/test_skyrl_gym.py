from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from skyrl_gym.envs.base_text_env import BaseTextEnv

from kuberoll_workers.adapters.skyrl_gym import SkyRLGymEnvironment
from kuberoll_workers.environments import Episode, EpisodeEnd, UnusableEnvironment, UnusableRow
from tests.adapters.libraries.support import ISOLATIONS, assert_needs_its_extra, run
from tests.environments.support import step_one

PROMPT = [{"role": "user", "content": "What is 3 + 4? Write #### and the answer.\n"}]
ROW = {"reward_spec": {"ground_truth": "7"}, "extra_info": {}}


class Greeter(BaseTextEnv):  # type: ignore[misc]
    """Adds a message to the prompt, or changes it."""

    closed = 0

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.name = env_config.name
        self.changes = extras.get("changes", False)

    def init(self, prompt: Any) -> Any:
        hello = {"role": "user", "content": f"I am {self.name}."}
        return ([hello] if self.changes else [*prompt, hello]), {}

    def step(self, action: str) -> Any:
        texts = [{"role": "user", "content": action}, {"role": "user", "content": "and on"}]
        return {"observations": texts, "reward": 0.25, "done": action == "bye", "metadata": {}}

    def get_metrics(self) -> Any:
        return {"length": 3, "nothing": float("nan"), "name": self.name}

    def close(self) -> None:
        Greeter.closed += 1


GREETER = {"id": "greeter", "entrypoint": f"{__name__}:Greeter", "parameters": {"name": "Sky"}}


def begin(environment: SkyRLGymEnvironment, metadata: Any = None, max_turns: int = 3) -> Any:
    episode = Episode(id="0-0-0", messages=PROMPT, metadata=metadata, seed=1, max_turns=max_turns)
    (start,) = environment.reset([episode])
    assert start is not None
    return start


@pytest.mark.parametrize(
    ("id_", "reply", "reward"),
    [
        ("gsm8k", "3 + 4 = 7\n#### 7", 1.0),
        ("gsm8k", "#### 8", 0.0),
        ("gsm8k", "7", 0.0),
        ("gsm8k", "", 0.0),
        ("aime", "so the answer is\nAnswer: $7$", 1.0),
        ("aime", "so the answer is\nAnswer: $8$", -1.0),
        ("aime", "", -1.0),
    ],
)
def test_one_turn(id_: str, reply: str, reward: float) -> None:
    environment = SkyRLGymEnvironment({"id": id_})
    start = begin(environment, {**ROW, "reward_model": {"ground_truth": "7"}})
    assert list(start.messages) == []
    result = step_one(environment, reply, start.metadata)
    assert (list(result.rewards), list(result.terminateds)) == ([reward], [True])
    assert result.observations[0]["content"] == ""


def test_several_turns() -> None:
    environment = SkyRLGymEnvironment({"id": "gsm8k_multi_turn"})
    state = begin(environment, ROW).metadata
    first = step_one(environment, "let me see", state)
    second = step_one(environment, "#### 8", state)
    third = step_one(environment, "#### 7", state)
    assert "tentative numeric answer" in first.observations[0]["content"]
    assert "only the final numeric answer" in second.observations[0]["content"]
    assert [first.rewards[0], second.rewards[0], third.rewards[0]] == [0.0, pytest.approx(0.2 / 3), 1.0]
    assert [first.terminateds[0], second.terminateds[0], third.terminateds[0]] == [False, False, True]
    assert third.metadata[0]["metrics"] == {"steps": 3}


def test_an_environment_of_ones_own() -> None:
    environment = SkyRLGymEnvironment({**GREETER, "stopStrings": ["!"]})
    start = begin(environment)
    assert list(start.messages) == [{"role": "user", "content": "I am Sky."}]
    assert start.stop_strings == ["!"]
    result = step_one(environment, "hi", start.metadata)
    assert result.observations[0]["content"] == "hi\nand on"
    assert result.next_stop_strings == [["!"]]
    last = step_one(environment, "bye", start.metadata)
    assert last.metadata[0] == {"episode": "0-0-0", "metrics": {"length": 3}}
    before = Greeter.closed
    environment.close([EpisodeEnd(id="0-0-0", metadata=None, reason="terminated")])
    assert Greeter.closed == before + 1
    with pytest.raises(ValueError, match="init of greeter changed the row's prompt"):
        begin(environment, {"changes": True})
    assert Greeter.closed == before + 2


@pytest.mark.parametrize("id_", ["gsm8k", "gsm8k_multi_turn", "aime"])
@pytest.mark.parametrize("metadata", [None, {"reward_spec": {}, "reward_model": {}}])
def test_rows_without_a_ground_truth_are_refused(id_: str, metadata: Any) -> None:
    with pytest.raises(UnusableRow, match=f"metadata: {id_} does not accept it: AssertionError"):
        begin(SkyRLGymEnvironment({"id": id_}), metadata)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.id: "),
        ({"id": "gsm9k"}, "config.id: SkyRL Gym has no environment 'gsm9k'; it has aime, "),
        ({"id": "gsm8k", "entrypoint": f"{__name__}:Greeter"}, "config.id: gsm8k is skyrl_gym.envs.gsm8k.env:GSM8kEnv"),
        ({"id": "nothing", "entrypoint": "no_module:Nothing"}, "cannot be imported: No module named 'no_module'"),
    ],
)
def test_a_wrong_config_names_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableEnvironment) as caught:
        SkyRLGymEnvironment(config)
    assert message in str(caught.value)


def test_a_machine_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_needs_its_extra(monkeypatch, "skyrl_gym", "skyrl_gym", "skyrl-gym", {"id": "gsm8k"})


@pytest.mark.processes
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_run(tmp_path: Path, isolation: str) -> None:
    rows = [{"messages": PROMPT, "metadata": ROW} for _ in range(8)]
    records = run(
        tmp_path,
        {"name": "sums", "type": "skyrl_gym", "config": {"id": "gsm8k_multi_turn"}, "isolation": isolation},
        ["#### 7", "#### 8", "I do not know"],
        dataset={"source": {"rows": rows}, "repeats": 4},
        rollout={"maxTurns": 4},
    )
    assert len(records) == 32
    for record in records:
        assert record.stop_reason == "terminated"
        answers = [message.content for message in record.messages if message.role == "assistant"]
        right = sum(answer.startswith("#### 7") for answer in answers)
        wrong = sum(answer.startswith("#### 8") for answer in answers)
        assert record.total_reward == pytest.approx(right + 0.05 * wrong)
        assert right == 1 or len(answers) == 4
