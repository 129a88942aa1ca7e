"""Environments of tools: schemas of functions, and answers to calls, wrong ones included."""

from __future__ import annotations

import json
from typing import Annotated, Any

import numpy
import pytest
from pydantic import Field

from kuberoll_workers.data.tool_calls import message_fields, parse_tool_calls
from kuberoll_workers.environments import Episode, EpisodeStart, ToolEnvironment, tool
from kuberoll_workers.environments.batches import ResetBatch, StepBatch
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.outcome import StepInvalid, StepOutcome, StepRaised, split_return, split_starts
from kuberoll_workers.environments.registry import PlainSpec
from tests.environments.calling import Shop
from tests.rollouts.fakes import runners

WANTED = {"wanted": {"pear": 2}}


def log(response: str) -> list[dict[str, Any]]:
    fields = message_fields(parse_tool_calls(response), 1)
    return [{"role": "user", "content": "Two pears."}, {"role": "assistant", "content": response, **fields}]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def split(returned: Any) -> StepOutcome:
    (outcome,) = split_return(returned, 1)
    assert isinstance(outcome, StepOutcome)
    return outcome


def episode() -> Episode:
    return Episode(id="0-0-0", messages=[], metadata=dict(WANTED), seed=1, max_turns=4)


def test_a_schema_is_made_from_a_method() -> None:
    (start,) = Shop({}).reset([episode()])
    assert start is not None
    assert list(start.tools or ()) == [
        {
            "type": "function",
            "function": {
                "name": "price",
                "description": "Price of an item, in cents.",
                "parameters": {
                    "type": "object",
                    "properties": {"item": {"type": "string", "description": "Name of the item."}},
                    "required": ["item"],
                },
            },
        },
        {
            "type": "function",
            "function": {
                "name": "buy",
                "description": "Put items into the basket.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "item": {"type": "string"},
                        "count": {"type": "integer", "minimum": 1, "maximum": 9, "default": 1},
                    },
                    "required": ["item"],
                },
            },
        },
    ]


@pytest.mark.parametrize("isolation", ["Inline", "Process"])
async def test_each_call_has_its_answer(isolation: str) -> None:
    spec = PlainSpec(name="shop", type=None, entrypoint="tests.environments.calling:Shop", config={})
    executor = make_executor(spec, isolation=isolation, processes=1, timeout=60.0)
    try:
        (start,) = await executor.run(ResetBatch([episode()]))
        assert isinstance(start, EpisodeStart)
        assert [function["function"]["name"] for function in start.tools or ()] == ["price", "buy"]
        text = call("price", item="pear") + call("buy", item="pear", count="2")
        (outcome,) = await executor.run(StepBatch.of_columns([log(text)], [WANTED]))
    finally:
        await executor.close()
    assert isinstance(outcome, StepOutcome)
    assert outcome.messages == (
        {"role": "tool", "content": "4", "tool_call_id": "call00101", "name": "price"},
        {"role": "tool", "content": "2 x pear", "tool_call_id": "call00102", "name": "buy"},
    )
    assert (outcome.role, outcome.content) == ("tool", "2 x pear")
    assert (outcome.reward, outcome.terminated) == (0.0, False)
    assert outcome.metadata == {**WANTED, "basket": {"pear": 2}}
    assert "basket" not in WANTED


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (call("sell", item="pear"), "Error: there is no tool 'sell'; the tools are price, buy"),
        (call("price", item="plum"), "Error: no plum here; there are apple, pear"),
        (call("price"), "Error: the arguments do not fit: item: Field required"),
        (call("price", item="pear", currency="EUR"), "Error: the arguments do not fit: currency: Extra inputs are not"),
        (call("buy", item="pear", count=10), "Error: the arguments do not fit: count: Input should be less than or"),
        (call("buy", item="pear", state={}), "Error: the arguments do not fit: state: Extra inputs are not permitted"),
        ("<tool_call>{price}</tool_call>", "Error: this call cannot be read: it is not JSON: Expecting property name"),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(response: str, answer: str) -> None:
    outcome = split(Shop({}).step([log(response)], [WANTED]))
    (message,) = outcome.messages
    assert message["content"].startswith(answer)
    assert (message["role"], message["tool_call_id"]) == ("tool", "call00101")
    assert (outcome.reward, outcome.terminated, outcome.metadata) == (0.0, False, WANTED)


@pytest.mark.parametrize(("basket", "reward"), [({"pear": 2}, 1.0), ({"pear": 1}, 0.0)])
def test_a_response_without_a_call_ends_the_episode(basket: dict[str, int], reward: float) -> None:
    outcome = split(Shop({}).step([log("Here you are.")], [{**WANTED, "basket": basket}]))
    assert (outcome.reward, outcome.terminated, outcome.content) == (reward, True, "")


def test_tools_may_end_an_episode_and_are_inherited() -> None:
    class Till(Shop):
        @tool
        def pay(self, state: dict[str, Any]) -> list[str]:
            """Pay for everything."""
            state["paid"] = True
            return ["paid"]

        def ended(self, state: dict[str, Any]) -> bool:
            return bool(state.get("paid"))

    till = Till()
    assert list(till.functions) == ["price", "buy", "pay"]
    outcome = split(till.step([log(call("pay"))], [{"wanted": None}]))
    assert (outcome.content, outcome.reward, outcome.terminated) == ('["paid"]', 1.0, True)


@pytest.mark.parametrize("score", ["1.0 ", None, [1.0], {"reward": 1.0}, 1j])
async def test_what_is_no_number_is_no_score(score: Any) -> None:
    class Wrong(Shop):
        def score(self, messages: Any, state: dict[str, Any]) -> Any:
            return score if state["wanted"] else 1.0

    logs, states = [log("Done."), log("Done.")], [WANTED, {"wanted": None}]
    async with runners({"shop": Wrong({})}) as made:
        wrong, right = await made["shop"].step_batch(logs, states)
    assert isinstance(wrong, StepRaised)
    assert "Wrong.score returned" in str(wrong)
    assert isinstance(right, StepOutcome)
    assert right.reward == 1.0


@pytest.mark.parametrize("score", [1, True, numpy.float32(1), numpy.array(1.0)])
def test_every_number_is_a_score(score: Any) -> None:
    class Right(Shop):
        def score(self, messages: Any, state: dict[str, Any]) -> Any:
            return score

    assert split(Right({}).step([log("Done.")], [WANTED])).reward == 1.0


def test_a_class_that_makes_no_schema_says_why() -> None:
    class None_(ToolEnvironment):
        pass

    class Bare(ToolEnvironment):
        @tool
        def look(self, where) -> str:  # type: ignore[no-untyped-def]
            return str(where)

    class Many(ToolEnvironment):
        @tool
        def look(self, *where: str) -> str:
            return str(where)

    for kind, message in [
        (None_, "None_ has no tools: mark its methods with @tool"),
        (Bare, "tool look: the parameter where has no annotation"),
        (Many, "tool look: *where: str cannot be called by name"),
    ]:
        with pytest.raises(TypeError) as caught:
            kind()
        assert str(caught.value).replace("'", "") == message


def test_nested_parameters_keep_their_own_names() -> None:
    class Titles(ToolEnvironment):
        @tool
        def find(self, title: str, options: dict[str, int], near: Annotated[list[str], Field(max_length=2)]) -> str:
            return title

    parameters = Titles().functions["find"].schema["function"]["parameters"]
    assert parameters["required"] == ["title", "options", "near"]
    assert parameters["properties"]["title"] == {"type": "string"}
    assert parameters["properties"]["near"] == {"type": "array", "items": {"type": "string"}, "maxItems": 2}


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ([{"role": "tool"}], "observations[0][0] is dict"),
        ([{"role": "tool", "content": "x", "tool_call_id": 3}], "the observation's tool_call_id is int 3; it must be"),
        ([{"content": "x"}] * 65, "observations[0] has 65 messages; at most 64 are taken"),
        ("x", "observations[0] is str 'x'; it must be a role and a content (text), or a list of such messages"),
        ([{"role": "tool", "content": "\ud800"}], "the observation's content holds a lone surrogate"),
    ],
)
def test_an_observation_is_checked_message_by_message(observation: Any, message: str) -> None:
    (fault,) = split_return(([observation], None, None, [0.0], [False]), 1)
    assert str(fault).startswith(message)


def test_an_empty_list_is_an_empty_observation() -> None:
    outcome = split(([[]], None, None, [0.0], [False]))
    assert (outcome.role, outcome.content, outcome.messages) == ("environment", "", ())


def test_declared_tools_are_checked() -> None:
    (fault,) = split_starts([EpisodeStart(tools=[{"type": "function"}])], 1)
    assert isinstance(fault, StepInvalid)
    assert str(fault).startswith("tools[0][0].name: found NoneType None")
