"""Environments that break the contract, each in one way; the good ones are `Counting` and `Corridor`."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from kuberoll_workers.environments import (
    EnvironmentInterface,
    EnvironmentReturn,
    Episode,
    EpisodeEnd,
    EpisodeStart,
    ScoringCase,
    UnusableRow,
)


class Counting(EnvironmentInterface):
    """Two turns; the reward is 1 for the number of the row."""

    scoring_cases: ClassVar[Any] = (
        ScoringCase(row={"metadata": {"number": 3}}, responses=["3", "no"], reward=(0.5, 1)),
    )

    def __init__(self, config: Any = None) -> None:
        self.config = config or {}

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        turns = [self.turn(log[-1]["content"], state) for log, state in zip(message_log_batch, metadata, strict=True)]
        return EnvironmentReturn(
            [{"role": "environment", "content": text} for text, _, _, _ in turns],
            [state for _, state, _, _ in turns],
            None,
            [reward for _, _, reward, _ in turns],
            [ended for _, _, _, ended in turns],
        )

    def turn(self, response: str, state: Any) -> tuple[str, Any, float, bool]:
        turns = state.get("turns", 0) + 1
        right = response.strip() == str(state["number"])
        return f"turn {turns}", {**state, "turns": turns}, float(right), turns == 2

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {"count": len(batch["total_reward"])}

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [
            {"messages": [{"role": "user", "content": f"Say {seed + n}"}], "metadata": {"number": seed + n}}
            for n in range(count)
        ]


class Opponent(Counting):
    """Breaks nothing: speaks as an assistant, and pays with a matrix."""

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        made = super().step(message_log_batch, metadata)
        said = [{**each, "role": "assistant"} for each in made.observations]
        return made._replace(observations=said, rewards=[[reward, 0.5] for reward in made.rewards])


class Ranked(Counting):
    """Scores the right ones of a group by how many are wrong."""

    def score_group(self, members: Any) -> Any:
        wrong = sum(member.reward == 0 for member in members)
        return [float(wrong) if member.reward else 0.0 for member in members]


class ShortScores(Ranked):
    """Has no score for a group of one."""

    def score_group(self, members: Any) -> Any:
        return super().score_group(members) if len(members) > 1 else []


class DrawnScores(Ranked):
    """Draws lots."""

    def score_group(self, members: Any) -> Any:
        return [random.random() for _ in members]


class CountedScores(Ranked):
    """Pays less for each group, by a count that another instance does not have."""

    groups = 0

    def score_group(self, members: Any) -> Any:
        type(self).groups += 1
        return [1 / self.groups for _ in members]


class Corridor(Counting):
    """Keeps how far each episode has gone in an object."""

    recovery: ClassVar[Any] = "replay"

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.left: dict[str, int] = {}

    def reset(self, episodes: list[Episode]) -> Sequence[EpisodeStart | None]:
        return [self.start(episode) for episode in episodes]

    def start(self, episode: Episode) -> EpisodeStart:
        length = self.left[episode.id] = random.Random(episode.seed).randint(2, 4)
        return EpisodeStart(
            messages=[{"role": "user", "content": f"{length} doors"}],
            metadata={**(episode.metadata or {}), "episode": episode.id},
        )

    def turn(self, response: str, state: Any) -> tuple[str, Any, float, bool]:
        self.left[state["episode"]] -= 1
        left = self.left[state["episode"]]
        return f"{left} to go", state, float(response == str(state["number"])), left == 0

    def close(self, episodes: list[EpisodeEnd]) -> None:
        for episode in episodes:
            self.left.pop(episode.id, None)


class FailingConstructor(Counting):
    def __init__(self, config: Any) -> None:
        self.reward = config["rewards"]


class UnknownRecovery(Counting):
    recovery: ClassVar[Any] = "later"


class RandomRows(Counting):
    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        rows = super().generate_dataset(count, seed)
        return [{**row, "metadata": {"number": random.random()}} for row in rows]


class FewRows(Counting):
    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        return super().generate_dataset(count // 2, seed)


class RowsWithoutPrompt(Counting):
    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{"metadata": {"number": n}} for n in range(count)]


class FailingGenerator(Counting):
    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        raise FileNotFoundError("words.txt")


class RefusesItsRows(Counting):
    def check_row(self, metadata: dict[str, Any] | None) -> None:
        raise UnusableRow("metadata.solution: found nothing; it must be a text")


class MarksRows(Counting):
    def check_row(self, metadata: dict[str, Any] | None) -> None:
        assert metadata is not None
        metadata["checked"] = True


class ShortRewards(Counting):
    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        returned = super().step(message_log_batch, metadata)
        return returned._replace(rewards=returned.rewards[1:])


class NanReward(Counting):
    def turn(self, response: str, state: Any) -> tuple[str, Any, float, bool]:
        text, state, _, ended = super().turn(response, state)
        return text, state, float("nan"), ended


class FailingStep(Counting):
    def turn(self, response: str, state: Any) -> tuple[str, Any, float, bool]:
        return super().turn(response, {"number": state["answer"]})


class ExpectsWords(Counting):
    """Fails for a response without words."""

    def turn(self, response: str, state: Any) -> tuple[str, Any, float, bool]:
        assert response.split()[0]
        return super().turn(response, state)


class BlamesTheRow(Counting):
    def turn(self, response: str, state: Any) -> tuple[str, Any, float, bool]:
        if not response:
            raise UnusableRow("there is no response")
        return super().turn(response, state)


class Clock(Counting):
    def turn(self, response: str, state: Any) -> tuple[str, Any, float, bool]:
        return f"at {time.time_ns()}", *super().turn(response, state)[1:]


class GlobalRandom(Counting):
    """Rewards at random, by the generator of the module."""

    scoring_cases: ClassVar[Any] = ()

    def turn(self, response: str, state: Any) -> tuple[str, Any, float, bool]:
        text, state, _, ended = super().turn(response, state)
        return text, state, random.random(), ended


class HiddenState(Counting):
    """Counts the turns of each number in the object, although it says that its metadata is all."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.turns: dict[str, int] = {}

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        for log, state in zip(message_log_batch, metadata, strict=True):
            if len(log) == 2:
                self.turns[str(state["number"])] = 0
        return super().step(message_log_batch, metadata)

    def turn(self, response: str, state: Any) -> tuple[str, Any, float, bool]:
        self.turns[str(state["number"])] += 1
        turns = self.turns[str(state["number"])]
        return f"turn {turns}", state, 0.0, turns == 2

    scoring_cases: ClassVar[Any] = ()


class SetInMetadata(Counting):
    def turn(self, response: str, state: Any) -> tuple[str, Any, float, bool]:
        text, state, reward, ended = super().turn(response, state)
        return text, {**state, "seen": {response}}, reward, ended


class FirstOfBatch(Counting):
    """Rewards the whole batch for its first response."""

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        returned = super().step(message_log_batch, metadata)
        return returned._replace(rewards=[returned.rewards[0]] * len(message_log_batch))


class Crossed(Counting):
    """Returns the states of the batch in another order."""

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        returned = super().step(message_log_batch, metadata)
        return returned._replace(metadata=sorted(returned.metadata, key=lambda state: str(state["number"])))


class ChangesMetadata(Counting):
    def turn(self, response: str, state: Any) -> tuple[str, Any, float, bool]:
        state["turns"] = state.get("turns", 0) + 1
        return "counted", state, float(response == str(state["number"])), state["turns"] == 2


class ChangesMessages(Counting):
    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        for log in message_log_batch:
            log[-1]["content"] = log[-1]["content"].strip()
            log.append({"role": "environment", "content": "seen"})
        return super().step([log[:-1] for log in message_log_batch], metadata)


class RandomWalk(Corridor):
    """Draws the length of each corridor from one generator of the instance."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.draw = random.Random(7)

    def start(self, episode: Episode) -> EpisodeStart:
        start = super().start(episode)
        self.left[episode.id] = self.draw.randint(2, 40)
        return start


class SharedSteps(Corridor):
    """Counts the steps of all of its episodes together: a replay beside other episodes differs."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.steps = 0

    def start(self, episode: Episode) -> EpisodeStart:
        self.steps = 0 if not self.left else self.steps
        return super().start(episode)

    def turn(self, response: str, state: Any) -> tuple[str, Any, float, bool]:
        self.steps += 1
        text, *rest = super().turn(response, state)
        return f"step {self.steps}, {text}", rest[0], rest[1], rest[2]


class NamedStart(Corridor):
    """Shows the policy the name of its episode, so that the samples of a prompt group begin differently."""

    def start(self, episode: Episode) -> EpisodeStart:
        start = super().start(episode)
        return EpisodeStart(messages=[{"role": "user", "content": episode.id}], metadata=start.metadata)


class TextFromReset(Corridor):
    def reset(self, episodes: list[Episode]) -> Any:
        super().reset(episodes)
        return ["go"] * len(episodes)


class NeverFrees(Corridor):
    def close(self, episodes: list[EpisodeEnd]) -> None:
        return None


class NoClose(Corridor):
    close = EnvironmentInterface.close


class ClosesOnce(Corridor):
    """Cannot close an episode that has not been stepped."""

    def start(self, episode: Episode) -> EpisodeStart:
        self.stepped: set[str] = getattr(self, "stepped", set())
        return super().start(episode)

    def turn(self, response: str, state: Any) -> tuple[str, Any, float, bool]:
        self.stepped.add(state["episode"])
        return super().turn(response, state)

    def close(self, episodes: list[EpisodeEnd]) -> None:
        for episode in episodes:
            self.stepped.remove(episode.id)
            del self.left[episode.id]


class ForgetsAtTheEnd(Corridor):
    """Claims that its metadata is all of its state."""

    recovery: ClassVar[Any] = "metadata"


class AcceptsEverything(Counting):
    scoring_cases: ClassVar[Any] = (
        ScoringCase(row={"metadata": {"number": 3}}, responses=["3"], reward=1),
        ScoringCase(row={"metadata": {"number": 3}}, responses=["13"], reward=0),
    )

    def turn(self, response: str, state: Any) -> tuple[str, Any, float, bool]:
        text, state, _, ended = super().turn(response, state)
        return text, state, float(str(state["number"]) in response), ended


class WrongCases(Counting):
    scoring_cases: ClassVar[Any] = ({"row": {}, "responses": "3", "reward": 1},)


class DividesByNone(Counting):
    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {"mean": sum(batch["total_reward"]) / len(batch["total_reward"])}
