"""Tools in the loop: calls are parsed and answered, and every token stays where it was sampled."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import orjson
import pytest

from kuberoll_workers.data.chat_observations import ChatTemplateObservations
from kuberoll_workers.data.messages import ExtendedMessage, token_array
from kuberoll_workers.data.prompts import Prompt, Sample, prompt_messages
from kuberoll_workers.data.record import FailureRecord, Partial, TrajectoryRecord, TurnRecord, decode_line, encode_line
from kuberoll_workers.data.tool_calls import ToolCalls, UnreadableCall, checked_call
from kuberoll_workers.environments import EpisodeStart
from kuberoll_workers.environments.interface import EnvironmentReturn, GroupMember
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, SamplingParameters
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.telemetry import RolloutMetrics
from tests.data.support import model
from tests.environments.calling import Shop
from tests.rollouts.fakes import CountingEnvironment, ScriptedPolicy, rollout_of, runners, sample, settings

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
PRICE = '<tool_call>\n{"name": "price", "arguments": {"item": "pear"}}\n</tool_call>'
BUY = '<tool_call>\n{"name": "buy", "arguments": {"item": "pear", "count": 2}}\n</tool_call>'


class Model:
    """Writes the responses of a script, turn by turn, in the tokens of a model family."""

    def __init__(self, of: Any, responses: list[str], *, calls: list[ToolCalls | None] | None = None) -> None:
        self.of = of
        self.responses = responses
        self.calls = calls
        self.requests: list[GenerationRequest] = []
        self.prompts: list[list[int]] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        turn = int(request.request_id.split("-")[3])
        self.requests.append(request)
        self.prompts.append(list(request.token_ids))
        ids = self.of.tokenizer.encode(self.responses[turn - 1]) + token_array([self.of.id(self.of.end)])
        calls = None if self.calls is None else self.calls[turn - 1]
        return GenerationResult(
            token_ids=ids, logprobs=array("f", [-0.5] * len(ids)), finish_reason="stop", tool_calls=calls
        )


def task(of: Any, *, tools: Any = None, metadata: Any = None, partial: Partial | None = None) -> Sample:
    chat = [{"role": "user", "content": "Two pears."}]
    ids = of.tokenizer.render_chat(chat, tools=tools)
    prompt = Prompt(
        task_index=0,
        task_name="shop",
        idx=None,
        messages=tuple(prompt_messages(chat, ids)),
        token_ids=ids,
        metadata={"wanted": {"pear": 2}} if metadata is None else metadata,
        stop_strings=None,
        sampling={},
        tools=tools,
    )
    return Sample(prompt=prompt, rollout_index=0, seed=1, partial=partial)


async def play(
    of: Any, policy: Any, given: Sample, environment: Any = None, *, isolation: str = "Inline", **changes: Any
) -> tuple[Any, list[Any]]:
    """The result of a trajectory, and its journaled turns."""
    results: list[Any] = []
    turns: list[TurnRecord] = []

    async def sink(result: Any) -> None:
        results.append(result)

    async def journal(turn: TurnRecord) -> None:
        turns.append(decode_line(encode_line(turn), TurnRecord, where="turn"))

    async with runners({"shop": environment or Shop({})}, isolation=isolation) as made:
        rollout = Rollout(
            policy=policy,
            environments=made,
            tokenizer=of.tokenizer,
            settings=settings(sampling=SamplingParameters(max_tokens=400), max_sequence_length=8000, **changes),
            metrics=RolloutMetrics("test"),
            observations=ChatTemplateObservations(of.tokenizer),
            turn_sink=journal,
        )
        await run_rollout(rollout, [given], sink)
    (result,) = results
    return result, turns


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama-3.1"])
async def test_every_prompt_is_what_was_sent_and_sampled_and_the_template_s_answers(name: str) -> None:
    of = model(name)
    policy = Model(of, [PRICE, f"{PRICE}\n{BUY}", "Done."])
    record, _ = await play(of, policy, task(of))
    assert isinstance(record, TrajectoryRecord)
    assert (record.stop_reason, record.total_reward, record.turn_count) == ("terminated", 1.0, 3)
    tools = [function.schema for function in Shop({}).functions.values()]
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Two pears."}]
    assert policy.prompts[0] == list(of.tokenizer.render_chat(chat, tools=tools))
    assert record.tools == tools
    answers = [["4"], ["4", "2 x pear"]]
    for turn, (response, texts) in enumerate(zip(policy.responses, answers, strict=False), start=1):
        sampled = [*of.tokenizer.encode(response), of.id(of.end)]
        # Literally what was sent and sampled, whatever the template would make of the response now.
        before = [*policy.prompts[turn - 1], *sampled]
        assert policy.prompts[turn][: len(before)] == before
        messages = [message for message in record.messages if message.turn == turn and message.role == "tool"]
        assert [message.content for message in messages] == texts
        rest = of.chat(
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "y"},
                *({"role": "tool", "tool_call_id": "call00101", "content": text} for text in texts),
            ]
        )
        added = policy.prompts[turn][len(before) :]
        assert rest[-len(added) :] == added
        # A template may group messages: the ids of all are the last one's.
        assert [len(message.token_ids) for message in messages] == [0] * (len(texts) - 1) + [len(added)]


async def test_the_record_has_the_calls_and_their_answers() -> None:
    of = model("qwen2.5")
    record, _ = await play(of, Model(of, [f"Let me see. {PRICE}{BUY}", "Done."]), task(of))
    user, response, first, second, last, end = record.messages
    assert isinstance(response, ExtendedMessage)
    assert response.content == f"Let me see. {PRICE}{BUY}"
    assert response.fields == {
        "text": "Let me see. ",
        "tool_calls": [
            {"id": "call00101", "type": "function", "function": {"name": "price", "arguments": '{"item": "pear"}'}},
            {
                "id": "call00102",
                "type": "function",
                "function": {"name": "buy", "arguments": '{"item": "pear", "count": 2}'},
            },
        ],
    }
    assert (first.fields, second.fields) == (
        {"tool_call_id": "call00101", "name": "price"},
        {"tool_call_id": "call00102", "name": "buy"},
    )
    assert not any(isinstance(message, ExtendedMessage) for message in (user, last, end))
    line = encode_line(record)
    assert encode_line(decode_line(line, TrajectoryRecord, where="x")) == line
    stored = orjson.loads(line)
    assert ["fields" in message for message in stored["messages"]] == [False, True, True, True, False, False]
    assert [tool["function"]["name"] for tool in stored["tools"]] == ["price", "buy"]


async def test_a_malformed_call_is_an_observation() -> None:
    of = model("qwen2.5")
    wrong = "<tool_call>\n{price pear}\n</tool_call>"
    record, _ = await play(of, Model(of, [wrong, BUY, "Done."]), task(of))
    assert (record.stop_reason, record.total_reward) == ("terminated", 1.0)
    answer = record.messages[2]
    assert (answer.role, answer.content[:44]) == ("tool", "Error: this call cannot be read: it is not J")
    assert record.messages[1].fields["invalid_tool_calls"][0]["text"] == "{price pear}"


async def test_answers_have_the_order_of_the_calls_whatever_came_first() -> None:
    of = model("qwen2.5")
    wrong = "<tool_call>\n{price pear}\n</tool_call>"
    record, turns = await play(of, Model(of, [f"{wrong}{BUY}{wrong}", "Done."]), task(of))
    assert [message.fields["tool_call_id"] for message in record.messages[2:5]] == [
        "call00101", "call00102", "call00103",
    ]  # fmt: skip
    assert [message.content[:19] for message in record.messages[2:5]] == [
        "Error: this call ca", "2 x pear", "Error: this call ca",
    ]  # fmt: skip
    assert [call["id"] for call in record.messages[1].fields["tool_calls"]] == ["call00102"]
    again, _ = await play(of, Model(of, ["", "Done."]), task(of, partial=Partial(turns)))
    assert again.messages == record.messages


async def test_a_custom_environment_s_answers_have_the_order_of_the_calls() -> None:
    of = model("qwen2.5")

    class Backwards(CountingEnvironment):
        def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            returned = super().step(logs, metadata)
            calls = logs[0][-1].get("tool_calls", [])
            answers = [{"role": "tool", "tool_call_id": call["id"], "content": call["id"]} for call in calls[::-1]]
            note = {"role": "user", "content": "note"}
            return returned._replace(observations=[[answers[0], note, *answers[1:]]] if answers else [[note]])

    wanted = task(of, tools=[LOOK], metadata={"turns": 2})
    record, _ = await play(of, Model(of, [PRICE * 3, "Done."]), wanted, Backwards())
    said = [message.content for message in record.messages[2:6]]
    assert said == ["call00101", "note", "call00102", "call00103"]


async def test_without_tools_nothing_is_parsed_or_stored() -> None:
    of = model("qwen2.5")

    steps: list[Any] = []

    class Seen(CountingEnvironment):
        def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            steps.extend(logs)
            return super().step(logs, metadata)

    record, _ = await play(of, Model(of, [PRICE, PRICE]), task(of, metadata={"turns": 2}), Seen())
    assert steps[-1][1] == {"role": "assistant", "content": PRICE}
    line = encode_line(record)
    assert b'"fields"' not in line
    assert b'"tools"' not in line
    assert line.endswith(b'"group_reward":null}\n')


async def test_a_row_s_tools_are_offered_and_the_environment_s_replace_them() -> None:
    of = model("qwen2.5")

    begun: list[Any] = []

    class Own(CountingEnvironment):
        def __init__(self, tools: Any) -> None:
            super().__init__()
            self.tools = tools

        def reset(self, episodes: list[Any]) -> list[EpisodeStart | None]:
            begun.extend(episodes)
            return [EpisodeStart(tools=self.tools) for _ in episodes]

    for tools, expected in [(None, [LOOK]), ([], None), ([Shop({}).functions["buy"].schema], ["buy"])]:
        policy = Model(of, ["x", "y"])
        record, _ = await play(of, policy, task(of, tools=[LOOK], metadata={"turns": 2}), Own(tools))
        assert begun[-1].tools == [LOOK]
        names = None if record.tools is None else [tool["function"]["name"] for tool in record.tools]
        assert names == (expected if expected is None or expected == ["buy"] else ["look"])
        chat = [{"role": "user", "content": "Two pears."}]
        assert policy.prompts[0] == list(of.tokenizer.render_chat(chat, tools=record.tools))


@pytest.mark.parametrize("recovery", ["metadata", "replay"])
async def test_a_resumed_trajectory_is_the_same(recovery: str) -> None:
    of = model("llama-3.1")
    kind = type("Recovering", (Shop,), {"recovery": recovery})
    responses = [PRICE, f"{PRICE}{BUY}", "<tool_call>{", "Done."]
    whole, turns = await play(of, Model(of, responses), task(of), kind({}))
    assert len(turns) == 3
    assert turns[0].tools == whole.tools
    assert turns[1].tools is None
    for count in (1, 2, 3):
        policy = Model(of, responses)
        record, _ = await play(of, policy, task(of, partial=Partial(turns[:count])), kind({}))
        assert len(policy.requests) == len(responses) - count
        for name in ("messages", "tools", "tokens", "rewards", "metadata", "stop_reason"):
            assert getattr(record, name) == getattr(whole, name), name


async def test_the_engine_s_calls_count_where_it_parses_them() -> None:
    of = model("qwen2.5")
    parsed = ToolCalls([checked_call("buy", {"item": "pear", "count": 2})], [UnreadableCall("[", "no call", 1)])
    policy = Model(of, ["[buy(pear, 2)] [", "Done."], calls=[parsed, ToolCalls()])
    record, _ = await play(of, policy, task(of), engine_parses_calls=True)
    assert record.total_reward == 1.0
    assert [message.content for message in record.messages[2:4]] == [
        "2 x pear",
        "Error: this call cannot be read: no call",
    ]
    assert policy.requests[0].tools == record.tools


async def test_an_engine_that_does_not_parse_is_found_out() -> None:
    of = model("qwen2.5")
    result, _ = await play(of, Model(of, [PRICE]), task(of), engine_parses_calls=True)
    assert isinstance(result, FailureRecord)
    assert "spec.generation.toolCallParser: the policy did not parse tool calls" in result.cause


def test_tools_and_calls_cross_the_wire() -> None:
    request = GenerationRequest(
        request_id="r", session_id="s", token_ids=token_array([1]), sampling=SamplingParameters(max_tokens=1)
    )
    for media in (wire.MSGPACK, wire.JSON):
        assert b"tools" not in wire.encode_request(request, media)
        asked = dataclasses.replace(request, tools=[LOOK])
        assert wire.decode_request(wire.encode_request(asked, media), media).tools == [LOOK]
        calls = ToolCalls([checked_call("f", {"a": 1})], [UnreadableCall("x", "y")])
        for given in (None, ToolCalls(), calls):
            result = GenerationResult(
                token_ids=token_array([1]), logprobs=array("f", [-0.5]), finish_reason="stop", tool_calls=given
            )
            assert wire.decode_result(wire.encode_result(result, media), media).tool_calls == given
    with pytest.raises(Exception, match=r"tools\[0\].type: found NoneType None"):
        wire.decode_request(wire.encode_request(dataclasses.replace(request, tools=[{}])))


async def test_a_row_without_a_prompt_needs_one_from_reset() -> None:
    of = model("qwen2.5")
    empty = dataclasses.replace(task(of).prompt, messages=(), token_ids=token_array())
    given = Sample(prompt=empty, rollout_index=0, seed=1)
    result, _ = await play(of, Model(of, ["x"]), given, CountingEnvironment())
    assert isinstance(result, FailureRecord)
    assert (result.kind, result.stage) == ("data", "prompt")
    assert result.cause == "the row has no messages, and the environment's reset added none: there is no prompt"

    class Greeting(Shop):
        def reset(self, episodes: list[Any]) -> list[EpisodeStart | None]:
            greeting = [{"role": "user", "content": "Two pears."}]
            return [dataclasses.replace(start, messages=greeting) for start in super().reset(episodes) if start]

    record, turns = await play(of, policy := Model(of, [BUY, "Done."]), given, Greeting({}))
    assert (record.total_reward, record.tokens.prompt) == (1.0, len(policy.prompts[0]))
    again, _ = await play(
        of, Model(of, [BUY, "Done."]), dataclasses.replace(given, partial=Partial(turns)), Greeting({})
    )
    assert again.messages == record.messages


async def test_raw_answers_are_said_to_be_plain(caplog: pytest.LogCaptureFixture) -> None:
    async with runners({"env": Shop({})}) as made:
        results: list[Any] = []

        async def sink(result: Any) -> None:
            results.append(result)

        policy = ScriptedPolicy(lambda request: PRICE if len(request.token_ids) < 100 else "Done.")
        rollout = rollout_of(made, policy=policy, sampling=SamplingParameters(max_tokens=200))
        await run_rollout(rollout, [sample(0), sample(1)], sink)
    assert [result.stop_reason for result in results] == ["terminated", "terminated"]
    assert caplog.text.count("spec.rollout.observationTemplate is Raw") == 1


class JudgedShop(Shop):
    """Its groups are scored by the number of calls, as their messages have them."""

    def score_group(self, members: list[GroupMember]) -> list[float]:
        chats = [member.messages for member in members]
        called = [sum(len(message.get("tool_calls", ())) for message in chat) for chat in chats]
        answered = [sum("tool_call_id" in message for message in chat) for chat in chats]
        assert called == answered
        return [float(count) for count in called]


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["Inline", "Process"])
async def test_a_group_is_scored_with_the_calls_of_its_members(isolation: str) -> None:
    of = model("qwen2.5")
    shop = PlainSpec(name="shop", type=None, entrypoint=f"{__name__}:JudgedShop", config={})
    record, _ = await play(of, Model(of, [PRICE, f"{PRICE}\n{BUY}", "Done."]), task(of), shop, isolation=isolation)
    assert isinstance(record, TrajectoryRecord)
    assert record.group_reward == 3.0
