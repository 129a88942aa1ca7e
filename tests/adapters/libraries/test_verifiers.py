from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import verifiers as vf
from aiohttp import web
from datasets import Dataset
from openai import AsyncOpenAI
from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

from kuberoll_workers.adapters.verifiers import ScoringFailed, VerifiersEnvironment
from kuberoll_workers.authoring import check_environment
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.environments import Episode, EpisodeEnd, UnusableEnvironment
from tests.adapters.libraries.support import ISOLATIONS, assert_needs_its_extra, run
from tests.environments.support import log_of

REASONING: dict[str, Any] = {
    "id": "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv",
    "arguments": {"gym": "chain_sum", "num_train_examples": 16, "num_eval_examples": 4, "seed": 3},
}


class Number(vf.MultiTurnEnv):  # type: ignore[misc]
    """A number to guess in three turns; `cleaned` counts the episodes that were cleaned up."""

    cleaned = 0

    async def setup_state(self, state: Any, **_: Any) -> Any:
        state["guesses"] = []
        return state

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        guess, number = messages[-1]["content"], state["answer"]
        state["guesses"].append(guess)
        if guess == "error":
            raise vf.Error("the environment failed")
        if guess == number:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        return [{"role": "user", "content": "No."}, {"role": "user", "content": f"{guess} is wrong."}]

    @vf.stop  # type: ignore[untyped-decorator]
    async def gave_up(self, state: Any) -> bool:
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == "stop"

    @vf.cleanup  # type: ignore[untyped-decorator]
    async def clean(self, state: Any) -> None:
        type(self).cleaned += 1


def solved(state: Any, answer: str) -> float:
    return float(answer in state["guesses"])


def brevity(completion: Any) -> float:
    return 1 / len([message for message in completion if message["role"] == "assistant"])


def broken(completion: Any) -> float:
    if any(message["content"] == "4" for message in completion):
        raise ZeroDivisionError("this reward function is broken")
    return 0.0


def number(*, functions: Any = (solved, brevity), weights: Any = (1.0, 0.5), rows: int = 16, **changes: Any) -> Any:
    """The environment."""
    dataset = Dataset.from_list([{"question": f"Guess {row}.", "answer": str(row % 4)} for row in range(rows)])
    rubric = vf.Rubric(funcs=list(functions), weights=list(weights))
    return Number(**{"dataset": dataset, "rubric": rubric, "max_turns": 3, "system_prompt": "Guess.", **changes})


def number_with_a_broken_reward() -> Any:
    return number(functions=[broken], weights=[1.0])


def number_with_tools() -> Any:
    function = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
    return number(oai_tools=[{"type": "function", "function": function}])


def best_of(states: Any) -> list[float]:
    return [0.0] * len(states)


def number_of_groups() -> Any:
    return number(functions=[best_of], weights=[1.0])


NUMBER = {"id": f"{__name__}:number"}


def episode(name: str = "0-0-0", answer: str = "2", max_turns: int = 8) -> Episode:
    messages = [{"role": "user", "content": "Guess."}]
    metadata = {"answer": answer, "task": "number", "example_id": 0}
    return Episode(id=name, messages=messages, metadata=metadata, seed=1, max_turns=max_turns)


async def play(environment: VerifiersEnvironment, replies: list[str], **changes: Any) -> list[Any]:
    (start,) = await environment.reset([episode(**changes)])
    assert start is not None
    state, results = start.metadata, list[Any]()
    for reply in replies:
        results.append(await environment.step([log_of(reply)], [state]))
        assert results[-1].metadata is not None
        (state,) = results[-1].metadata
    await environment.close([EpisodeEnd(id=episode(**changes).id, metadata=state, reason="terminated")])
    return results


@asynccontextmanager
async def client_of(records: list[TrajectoryRecord]) -> Any:
    """A client of OpenAI's API whose model of a record's key writes its responses."""
    responses = {str(tuple(record.key)): _responses(record) for record in records}

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        said = sum(message["role"] == "assistant" for message in body["messages"])
        message = {"role": "assistant", "content": responses[body["model"]][said]}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        made = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        return web.json_response(made)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


def _responses(record: TrajectoryRecord) -> list[str]:
    return [message.content for message in record.messages if message.role == "assistant"]


async def own_results(environment: Any, records: list[TrajectoryRecord]) -> list[Any]:
    """Results of verifiers' own rollouts with the responses of the records."""
    rows = {row["example_id"]: row for row in environment.get_dataset()}
    async with client_of(records) as client:
        return await asyncio.gather(
            *(
                environment.run_rollout(rows[record.metadata["example_id"]], client, str(tuple(record.key)), {})
                for record in records
                if record.metadata is not None
            )
        )


def test_rewards_are_those_of_verifiers_own_rollouts(tmp_path: Path) -> None:
    """64 trajectories of the package's own environment over reasoning-gym."""
    environment = ReasoningGymEnv(**REASONING["arguments"])
    answers = [environment.rg_dataset[index]["answer"] for index in range(8)]
    records = run(
        tmp_path,
        {"name": "sums", "type": "verifiers", "config": REASONING},
        [*(f"<think>Hm.</think><answer>{answer}</answer>" for answer in answers), "<answer>7", "I do not know"],
        dataset={"source": {"generator": {"count": 16}}, "repeats": 4},
        torch=True,
    )
    assert len(records) == 64
    results = asyncio.run(own_results(environment, records))
    assert [record.total_reward for record in records] == pytest.approx([result["reward"] for result in results])
    assert {record.total_reward for record in records} >= {0.0, 1.0}
    for record, result in zip(records, results, strict=True):
        assert record.metadata is not None
        assert record.metadata["metrics"] == pytest.approx(result["metrics"])
        assert (record.stop_reason, record.turn_count) == ("terminated", 1)


@pytest.mark.processes
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_episodes_of_several_turns_are_those_of_verifiers(tmp_path: Path, isolation: str) -> None:
    records = run(
        tmp_path,
        {"name": "number", "type": "verifiers", "config": NUMBER, "isolation": isolation, "processes": 1},
        ["0", "1", "2", "3", "stop"],
        dataset={"source": {"generator": {"count": 16}}, "repeats": 4},
        torch=True,
    )
    assert len(records) == 64
    results = asyncio.run(own_results(number(), records))
    assert {record.turn_count for record in records} == {1, 2, 3}
    for record, result in zip(records, results, strict=True):
        assert record.metadata is not None
        assert record.total_reward == pytest.approx(result["reward"])
        assert record.metadata["metrics"] == pytest.approx(result["metrics"])
        assert record.metadata["stop_condition"] == result["stop_condition"]
        said = [message["content"] for message in result["completion"] if message["role"] == "assistant"]
        assert _responses(record) == said
        observed = "\n".join(m["content"] for m in result["completion"] if m["role"] == "user")
        assert "\n".join(m.content for m in record.messages[3:] if m.role != "assistant" and m.content) == observed


async def test_the_jobs_last_turn_is_scored() -> None:
    environment = VerifiersEnvironment(NUMBER)
    first, second = await play(environment, ["0", "1"], max_turns=2)
    assert (list(first.rewards), list(first.terminateds)) == ([0.0], [False])
    assert first.observations[0]["content"] == "No.\n0 is wrong."
    assert (list(second.rewards), list(second.terminateds)) == ([0.25], [True])
    assert second.metadata[0]["stop_condition"] == "max_turns_reached"
    await environment.shutdown()


async def test_a_failure_is_no_reward() -> None:
    """verifiers logs what a reward function raises, and counts it as 0."""
    environment = VerifiersEnvironment({"id": f"{__name__}:number_with_a_broken_reward"})
    assert list((await play(environment, ["stop"]))[-1].rewards) == [0.0]
    with pytest.raises(ScoringFailed, match="this reward function is broken"):
        await play(environment, ["4", "stop"])
    with pytest.raises(vf.Error, match="the environment failed"):
        await play(environment, ["error"])
    await environment.shutdown()


async def test_each_episode_is_cleaned_up_once() -> None:
    environment = VerifiersEnvironment(NUMBER)
    before = Number.cleaned
    await play(environment, ["stop"])
    assert Number.cleaned == before + 1
    await environment.reset([episode("a"), episode("b")])
    await environment.reset([episode("a")])
    assert Number.cleaned == before + 2
    await environment.close([EpisodeEnd(id="a", metadata=None, reason="failed")])
    await environment.shutdown()
    assert Number.cleaned == before + 4


def test_signals_remain_the_workers() -> None:
    before = signal.getsignal(signal.SIGINT)
    VerifiersEnvironment(NUMBER)
    assert signal.getsignal(signal.SIGINT) is before
    failures: list[BaseException] = []

    def make() -> None:
        try:
            VerifiersEnvironment(NUMBER)
        except BaseException as error:
            failures.append(error)

    # Only the main thread may set signals.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert failures == []


def test_the_generator_has_the_environments_rows() -> None:
    environment = VerifiersEnvironment(REASONING)
    rows = environment.generate_dataset(8, 5)
    assert environment.generate_dataset(3, 5) == rows[:3]
    assert rows[0]["messages"][0]["role"] == "system"
    assert {"question", "answer", "task", "example_id"} <= rows[0]["metadata"].keys()
    with pytest.raises(UnusableEnvironment, match=r"the train dataset of .* has only 16 rows"):
        environment.generate_dataset(17, 5)
    evaluation = VerifiersEnvironment({**REASONING, "split": "eval"})
    questions = {row["metadata"]["question"] for row in environment.generate_dataset(16, 0)}
    assert questions.isdisjoint(row["metadata"]["question"] for row in evaluation.generate_dataset(4, 0))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.id: "),
        ({"id": "no-such-environment"}, "config.id: "),
        ({"id": f"{__name__}:nothing"}, "config.id: .* cannot be imported"),
        ({"id": f"{__name__}:episode"}, "config.id: .* is Episode, not a MultiTurnEnv of verifiers"),
        ({"id": f"{__name__}:number_with_tools"}, "config.id: .* has tools, which are not supported"),
        ({"id": f"{__name__}:number_of_groups"}, "config.id: .* scores groups of rollouts together"),
    ],
)
def test_a_wrong_config_names_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableEnvironment, match=message):
        VerifiersEnvironment(config)


def test_a_machine_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_needs_its_extra(monkeypatch, "verifiers", "verifiers", "verifiers", NUMBER)


@pytest.mark.slow
def test_the_contract_of_an_environment_that_can_be_replayed() -> None:
    results = {
        result.check: result.status for result in check_environment("verifiers", {**NUMBER, "recovery": "replay"})
    }
    assert results["replay"] == results["closing"] == results["nonsense"] == "ok"
