from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
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
from kuberoll_workers.data.causes import Cause, Evidence
from kuberoll_workers.data.messages import chat_message
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.tool_calls import message_fields, parse_tool_calls
from kuberoll_workers.environments import Episode, EpisodeEnd, UnusableEnvironment
from kuberoll_workers.environments.exception_causes import cause_of
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.interface import GroupMember
from tests.adapters.libraries.support import assert_needs_its_extra, run
from tests.environments.support import log_of
from tests.policy.openai_serving import tokenizer_with_ends

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


PRICES = {"apple": 3, "pear": 4}


def price(item: str) -> int:
    """Price of an item, in cents."""
    return PRICES[item]


async def total(state: Any, first: int, second: int = 0) -> str:
    """Sum of two prices."""
    state["totals"].append(first + second)
    return f"{first + second} cents"


class Shop(vf.StatefulToolEnv):  # type: ignore[misc]
    """A price to find out; `total` writes into the episode's state."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.add_tool(total, args_to_skip=["state"])

    async def setup_state(self, state: Any, **_: Any) -> Any:
        state["totals"] = []
        return state

    def update_tool_args(self, tool_name: str, tool_args: Any, messages: Any, state: Any, **_: Any) -> Any:
        return {**tool_args, "state": state} if tool_name == "total" else tool_args


def right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def economy(state: Any, completion: Any) -> float:
    asked = sum(len(message.get("tool_calls") or ()) for message in completion)
    beside = [message["content"] for message in completion if message.get("tool_calls")]
    assert not any("arguments" in text for text in beside)
    return (10 * len(state.get("totals", ())) + asked) / 100


def shop(kind: Any = vf.ToolEnv, **changes: Any) -> Any:
    dataset = Dataset.from_list([{"question": f"{row}?", "answer": str(3 + row % 2)} for row in range(16)])
    rubric = vf.Rubric(funcs=[right, economy])
    given = {"dataset": dataset, "rubric": rubric, "max_turns": 4, "tools": [price]}
    return kind(**{**given, **changes})


def shop_with_state() -> Any:
    return shop(Shop)


def shop_that_stops() -> Any:
    """One that ends an episode over a call that cannot be read, or that its tool fails for."""
    return shop(stop_errors=[ValueError, KeyError])


def shop_whose_sandbox_is_down() -> Any:
    def look(item: str) -> str:
        """Look."""
        raise vf.SandboxError("no sandbox")

    return shop(tools=[look], stop_errors=[vf.SandboxError])


def called(name: str, text: str = "", **arguments: Any) -> str:
    return f"{text}<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def best(states: Any, answers: Any) -> list[float]:
    """1 for those that came closest of their group."""
    misses = [min(abs(int(guess) - int(a)) for guess in s["guesses"]) for s, a in zip(states, answers, strict=True)]
    return [float(miss == min(misses)) for miss in misses]


def steps_and_client(states: Any) -> list[float]:
    """What a rubric may read of states: steps, responses, and entries that nothing has set."""
    assert all(state["client"] is None or state["client"] for state in states)
    assert all(step["response"].choices[0].message.content for state in states for step in state["trajectory"])
    return [float(len(state["trajectory"]) + state.get("nothing", 0)) for state in states]


def judged(states: Any) -> list[float]:
    with socket.socket() as taken:
        # Bound, and nobody listens.
        taken.bind(("127.0.0.1", 0))
        socket.create_connection(taken.getsockname()).close()
    return [1.0] * len(states)


def broken_for_groups(states: Any) -> list[float]:
    raise ZeroDivisionError("this group function is broken")


class Resources(Number):
    """Entries of a state that are no data."""

    async def setup_state(self, state: Any, **_: Any) -> Any:
        state["sandbox"], state["pair"] = object(), (1, 2)
        return await super().setup_state(state)


def pairs(states: Any) -> list[float]:
    return [float(state["pair"] == (1, 2)) for state in states]


def sandboxes(states: Any) -> list[float]:
    return [float(state.get("sandbox") is None) for state in states]


def number_of_groups() -> Any:
    """A group of rubrics, one of which has functions of both kinds."""
    both = vf.Rubric(funcs=[solved, best], weights=[1.0, 0.25])
    return number(rubric=vf.RubricGroup([both, vf.Rubric(funcs=[steps_and_client, brevity], weights=[0.125, 0.5])]))


def number_with_a_broken_group_reward() -> Any:
    return number(functions=[solved, broken_for_groups])


def number_with_a_judge_that_is_gone() -> Any:
    return number(functions=[solved, judged])


def resources(function: Any = pairs) -> Any:
    dataset = Dataset.from_list([{"question": "Guess.", "answer": "2"}])
    return Resources(dataset=dataset, rubric=vf.Rubric(funcs=[function]), max_turns=3)


def resources_that_are_scored() -> Any:
    return resources(sandboxes)


NUMBER = {"id": f"{__name__}:number"}


def episode(name: str = "0-0-0", answer: str = "2", max_turns: int = 8) -> Episode:
    messages = [{"role": "user", "content": "Guess."}]
    metadata = {"answer": answer, "task": "number", "example_id": 0}
    return Episode(id=name, messages=messages, metadata=metadata, seed=1, max_turns=max_turns)


async def play(environment: VerifiersEnvironment, replies: list[str], **changes: Any) -> list[Any]:
    (start,) = await environment.reset([episode(**changes)])
    assert start is not None
    state, results = start.metadata, list[Any]()
    for turn, reply in enumerate(replies, 1):
        log = log_of(reply)
        log[-1] |= message_fields(parse_tool_calls(reply), turn)
        results.append(await environment.step([log], [state]))
        assert results[-1].metadata is not None
        (state,) = results[-1].metadata
    await environment.close([EpisodeEnd(id=episode(**changes).id, metadata=state, reason="terminated")])
    return results


def member(result: Any, name: str = "0-0-0") -> GroupMember:
    (metadata,) = result.metadata
    return GroupMember(id=name, messages=[], metadata=metadata, reward=0.0, stop_reason="terminated")


async def own_rollout(environment: Any, replies: list[str], answer: str) -> Any:
    """verifiers' own rollout of the episode that `play` plays."""
    fields = [message_fields(parse_tool_calls(reply), turn) for turn, reply in enumerate(replies, 1)]
    messages = [
        {"role": "assistant", "content": own.pop("text", reply), **own}
        for own, reply in zip(fields, replies, strict=True)
    ]
    begun = episode(answer=answer)
    async with client_with({"m": messages}) as client:
        return await environment.rollout({**(begun.metadata or {}), "prompt": list(begun.messages)}, client, "m", {})


def client_of(records: list[TrajectoryRecord]) -> Any:
    """A client of OpenAI's API whose model of a record's key writes its responses."""
    return client_with({str(tuple(record.key)): _answers(record) for record in records})


@asynccontextmanager
async def client_with(responses: dict[str, list[dict[str, Any]]]) -> Any:
    """A client of OpenAI's API with models that write these messages."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        said = sum(message["role"] == "assistant" for message in body["messages"])
        choice = {"index": 0, "finish_reason": "stop", "message": responses[body["model"]][said]}
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


EPISODES = [
    [called("price", "Let me see.\n", item="pear"), "4"],
    [called("price", item="apple") + called("total", first=1, second=2), called("total", "So.", first=2), "3"],
    [called("price", item="plum"), called("price", wrong=1), called("nothing"), called("price", item="pear")],
    ["4"],
    [called("total", "<think>Hm.</think>So.", first=5), "<think>3?</think>4"],
]


@pytest.mark.parametrize("made", ["shop", "shop_with_state"])
async def test_calls_are_answered_and_scored_as_by_verifiers(made: str) -> None:
    environment, own = VerifiersEnvironment({"id": f"{__name__}:{made}"}), globals()[made]()
    (start,) = await environment.reset([episode()])
    assert start is not None
    assert start.tools == own.oai_tools
    ends = []
    for replies in EPISODES:
        *others, last = results = await play(environment, replies, answer="4")
        state = await own_rollout(own, replies, "4")
        await own.rubric.score_rollout(state)
        assert [result.rewards for result in others] == [[0.0]] * len(others)
        assert (list(last.rewards), list(last.terminateds)) == ([pytest.approx(state["reward"])], [True])
        assert last.metadata[0]["metrics"] == pytest.approx(state["metrics"])
        ends.append(last.metadata[0]["stop_condition"])
        assert ends[-1] == state["stop_condition"]
        answers = [dict(message) for message in state["completion"] if message["role"] == "tool"]
        shown = [result.observations[0] for result in results]
        assert [answer for one in shown if isinstance(one, list) for answer in one] == answers
    assert ends == ["no_tools_called"] * 2 + ["max_turns_reached"] + ["no_tools_called"] * 2
    await environment.shutdown()


async def test_a_group_is_scored_as_by_verifiers_in_another_instance() -> None:
    environment, own = VerifiersEnvironment({"id": f"{__name__}:number_of_groups"}), number_of_groups()
    groups = [["0", "1", "3"], ["2"], ["1", "stop"], ["0", "0", "0"]]
    members, states = [], []
    for number, replies in enumerate(groups):
        members.append(member((await play(environment, replies))[-1], f"0-{number}-0"))
        states.append(await own_rollout(own, replies, "2"))
    await environment.shutdown()
    await own.rubric.score_group(states)
    stored = json.loads(json.dumps([one.metadata for one in members]))
    assert stored == [one.metadata for one in members]
    other = VerifiersEnvironment({"id": f"{__name__}:number_of_groups"})
    for _ in range(2):
        scores = await other.score_group(members)
        assert [score.reward for score in scores] == pytest.approx([state["reward"] for state in states])
        for score, state in zip(scores, states, strict=True):
            assert score.metadata is not None
            assert score.metadata["metrics"] == pytest.approx(state["metrics"])
    await other.shutdown()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("made", "isolation"),
    [
        ("shop", "Inline"),
        pytest.param("shop", "Process", marks=pytest.mark.long),
        pytest.param("shop_with_state", "Inline", marks=pytest.mark.long),
        pytest.param("shop_with_state", "Process", marks=pytest.mark.long),
    ],
)
def test_tools_are_answered_as_by_verifiers(tmp_path: Path, made: str, isolation: str) -> None:
    """Right, wrong and unknown calls, and two at once; each response is drawn anew in each turn."""
    (tmp_path / "model").mkdir()
    texts = [
        called("price", "Let me see.\n", item="pear"),
        called("price", item="apple") + called("total", first=1, second=2),
        called("price", item="plum"),
        called("price", wrong=1),
        called("total", "So.", first="x"),
        "3",
        "4",
    ]
    records = run(
        tmp_path,
        {
            "name": "shop",
            "type": "verifiers",
            "config": {"id": f"{__name__}:{made}"},
            "isolation": isolation,
            **({"processes": 1} if isolation == "Process" else {}),
        },
        texts,
        dataset={"source": {"generator": {"count": 16}}, "repeats": 2},
        torch=True,
        model=tokenizer_with_ends(tmp_path / "model"),
    )
    assert len(records) == 32
    environment = globals()[made]()
    results = asyncio.run(own_results(environment, records))
    names = [tool["function"]["name"] for tool in environment.oai_tools]
    for record, result in zip(records, results, strict=True):
        assert record.metadata is not None
        assert record.tools is not None
        assert [tool["function"]["name"] for tool in record.tools] == names
        assert record.total_reward == pytest.approx(result["reward"])
        assert record.metadata["metrics"] == pytest.approx(result["metrics"])
        assert record.metadata["stop_condition"] == result["stop_condition"]
        own = [m["content"] for m in result["completion"] if m["role"] == "tool"]
        answers = [chat_message(message) for message in record.messages if message.role == "tool"]
        assert [answer["content"] for answer in answers] == own
        assert all(answer["tool_call_id"] for answer in answers)
    assert {record.metadata["stop_condition"] for record in records if record.metadata} == {
        "no_tools_called",
        "max_turns_reached",
    }
    assert max(len([m for m in record.messages if m.role == "tool"]) for record in records) >= 2


async def test_a_call_that_cannot_be_read_is_answered() -> None:
    for made in ("shop", "shop_with_state"):
        environment = VerifiersEnvironment({"id": f"{__name__}:{made}"})
        broken, good, last = await play(
            environment,
            [
                '<tool_call>{"tool": "price"}</tool_call><tool_call>{',
                called("price", item="pear") + "<tool_call>{",
                "4",
            ],
            answer="4",
        )
        contents = [message["content"] for message in broken.observations[0]]
        assert [content.partition(": ")[0] for content in contents] == ["Error"] * 2
        assert contents[0].startswith("Error: this call cannot be read: the tool's name is missing")
        assert contents[1].startswith("Error: this call cannot be read: it is not JSON")
        answer, error = good.observations[0]
        assert answer == {"role": "tool", "tool_call_id": "call00201", "content": "4"}
        assert (error["tool_call_id"], error["role"]) == ("call00202", "tool")
        assert (list(last.rewards), list(last.terminateds)) == ([1.04], [True])
        await environment.shutdown()


@pytest.mark.parametrize("reply", ["<tool_call>{", called("price", item="plum")])
async def test_an_episode_that_ends_over_a_call_is_scored(reply: str) -> None:
    """verifiers' `stop_errors`."""
    environment = VerifiersEnvironment({"id": f"{__name__}:shop_that_stops"})
    (only,) = await play(environment, [reply])
    assert (list(only.rewards), list(only.terminateds)) == ([0.01], [True])
    assert only.metadata[0]["stop_condition"] == "has_error"
    await environment.shutdown()


async def test_a_tool_whose_sandbox_is_down_is_a_failure() -> None:
    environment = VerifiersEnvironment({"id": f"{__name__}:shop_whose_sandbox_is_down"})
    with pytest.raises(vf.ToolCallError):
        await play(environment, [called("look", item="x")])
    await environment.shutdown()


@pytest.mark.processes
@pytest.mark.parametrize("isolation", ["Inline", pytest.param("Process", marks=pytest.mark.long)])
def test_groups_are_scored_as_by_verifiers(tmp_path: Path, isolation: str) -> None:
    records = run(
        tmp_path,
        {
            "name": "number",
            "type": "verifiers",
            "config": {"id": f"{__name__}:number_of_groups"},
            "isolation": isolation,
            **({"processes": 2} if isolation == "Process" else {}),
        },
        ["0", "1", "2", "3"],
        dataset={"source": {"generator": {"count": 16}}, "repeats": 4},
        torch=True,
    )
    assert len(records) == 64
    results = asyncio.run(own_groups(number_of_groups(), records))
    for record, result in zip(records, results, strict=True):
        assert record.metadata is not None
        assert record.group_reward == pytest.approx(result["reward"])
        assert record.total_reward == pytest.approx(result["reward"])
        assert record.metadata["metrics"] == pytest.approx(result["metrics"])
        assert record.metadata["stop_condition"] == result["stop_condition"]
    assert {record.metadata["metrics"]["best"] for record in records if record.metadata} == {0.0, 1.0}


async def test_group_scores_fail_where_verifiers_would_count_0() -> None:
    environment = VerifiersEnvironment({"id": f"{__name__}:number_with_a_broken_group_reward"})
    (ended,) = await play(environment, ["2"])
    with pytest.raises(ScoringFailed, match="this group function is broken"):
        await environment.score_group([member(ended)])
    await environment.shutdown()


async def test_a_judge_that_a_reward_function_cannot_reach_is_no_bug_of_the_function() -> None:
    environment = VerifiersEnvironment({"id": f"{__name__}:number_with_a_judge_that_is_gone"})
    (ended,) = await play(environment, ["2"])
    with pytest.raises(ScoringFailed) as failed:
        await environment.score_group([member(ended)])
    assert cause_of(failed.value) == Cause("DependencyUnavailable", Evidence(error="ECONNREFUSED"))
    await environment.shutdown()


async def test_entries_of_a_state_that_are_no_data_are_missed_only_where_they_are_read() -> None:
    environment = VerifiersEnvironment({"id": f"{__name__}:resources"})
    (ended,) = await play(environment, ["2"])
    (score,) = await environment.score_group([member(ended)])
    assert (score.reward, score.metadata["metrics"]) == (1.0, {"pairs": 1.0, "num_turns": 1.0})  # type: ignore[index]
    # One that the window ended has no score.
    unscored = GroupMember(id="1", messages=[], metadata={"answer": "2"}, reward=0.0, stop_reason="truncated")
    assert [score.reward for score in await environment.score_group([unscored, member(ended)])] == [0.0, 1.0]
    await environment.shutdown()
    environment = VerifiersEnvironment({"id": f"{__name__}:resources_that_are_scored"})
    (ended,) = await play(environment, ["2"])
    with pytest.raises(ScoringFailed, match=r"state\['sandbox'\] of an ended rollout: it was not kept"):
        await environment.score_group([member(ended)])
    await environment.shutdown()


def test_only_rubrics_of_groups_hold_groups_back() -> None:
    assert Hooks.of(VerifiersEnvironment({"id": f"{__name__}:number_of_groups"})).score_group
    assert not Hooks.of(VerifiersEnvironment(NUMBER)).score_group


def _responses(record: TrajectoryRecord) -> list[str]:
    return [message.content for message in record.messages if message.role == "assistant"]


def _answers(record: TrajectoryRecord) -> list[dict[str, Any]]:
    """Responses as vLLM's server returns them: calls, and the text beside them."""
    said = [chat_message(message) for message in record.messages if message.role == "assistant"]
    names = ("role", "content", "tool_calls")
    return [
        {name: one[name] for name in names if name in one} | {"content": one.get("text", one["content"])}
        for one in said
    ]


async def own_groups(environment: Any, records: list[TrajectoryRecord]) -> list[Any]:
    """Results of verifiers' own groups with the responses of the records; a group's samples have one client each."""
    rows = {row["example_id"]: row for row in environment.get_dataset()}
    results: list[Any] = []
    for _, group in itertools.groupby(records, lambda record: record.task_index):
        members = list(group)
        async with client_of(members) as client:
            states = await asyncio.gather(
                *(
                    environment.rollout(rows[one.metadata["example_id"]], client, str(tuple(one.key)), {})
                    for one in members
                    if one.metadata is not None
                )
            )
        # As its run_group goes on.
        await environment.rubric.score_group(states)
        results += states
    return results


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


@pytest.mark.slow
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
@pytest.mark.parametrize("isolation", [pytest.param("Inline", marks=pytest.mark.long), "Process"])
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
