"""Built-in environments agree on a response: what is in thoughts, or was cut off, is no answer, call or move."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kuberoll_workers.data.messages import ExtendedMessage
from kuberoll_workers.data.record import TrajectoryRecord, decode_line, encode_line
from kuberoll_workers.environments.builtin.blackjack import BlackjackEnvironment
from kuberoll_workers.environments.builtin.code.execution import CodeExecutionEnvironment
from kuberoll_workers.environments.builtin.code.jaccard import CodeJaccardEnvironment
from kuberoll_workers.environments.builtin.judge.verdicts import JsonLabels, Labels, Scale
from kuberoll_workers.environments.builtin.math.answers import MathAnswersEnvironment
from kuberoll_workers.environments.builtin.multiple_choice import MultipleChoiceEnvironment
from kuberoll_workers.environments.builtin.string_match import StringMatchEnvironment
from kuberoll_workers.policy.interface import SamplingParameters
from tests.environments.calling import Shop
from tests.rollouts.fakes import CountingEnvironment, ScriptedPolicy, roll, sample

CHOICE = {"ground_truth": "B", "options": ["Paris", "Rome", "Oslo"]}
PROGRAM = {"tests": ["assert f(2) == 4"]}
BUY = '<tool_call>{"name": "buy", "arguments": {"item": "pear"}}</tool_call>'

# An environment, a row's metadata, and a right answer.
ENVIRONMENTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "math box": (MathAnswersEnvironment, {"ground_truth": "42"}, r"\boxed{42}"),
    "math marker": (MathAnswersEnvironment, {"ground_truth": "42"}, "The answer is 42.\n"),
    "math line": (MathAnswersEnvironment, {"ground_truth": "42"}, "42"),
    "choice": (MultipleChoiceEnvironment, CHOICE, "Answer: B\n"),
    "choice box": (MultipleChoiceEnvironment, CHOICE, r"\boxed{B}"),
    "choice line": (MultipleChoiceEnvironment, CHOICE, "Rome"),
    "string": (StringMatchEnvironment, {"ground_truth": "Rome"}, "Rome"),
    "string tag": (lambda: StringMatchEnvironment({"part": "tag"}), {"ground_truth": "Rome"}, "<answer>Rome</answer>"),
    "jaccard": (CodeJaccardEnvironment, {"ground_truth": "return x"}, "```python\nreturn x\n```\n"),
}
# Those that no text of the answer completes until the response has ended.
WHOLE = ("math line", "choice line", "string")


async def rewards(name: str, cases: list[tuple[str, bool, bool]]) -> list[float]:
    """The rewards of responses: each with whether the prompt has opened its thoughts, and whether it is cut off."""
    kind, metadata, _ = ENVIRONMENTS[name]
    given = [
        sample(
            number,
            prompt="What?\n<think>\n" if opened else "What?\n",
            metadata=metadata,
            sampling={"max_tokens": len(response) + (not cut)},
        )
        for number, (response, opened, cut) in enumerate(cases)
    ]
    policy = ScriptedPolicy(lambda request: cases[int(request.request_id.split("-")[0])][0])
    records = await roll(given, policy=policy, environments={"env": kind()}, max_sequence_length=4000)
    assert [record.messages[1].truncated for record in records] == [cut for _, _, cut in cases]
    return [record.total_reward for record in records]


@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_only_an_answer_after_thoughts_that_is_complete_is_paid(name: str) -> None:
    answer = ENVIRONMENTS[name][2]
    for opened in (False, True):
        begun = "" if opened else "<think>"
        thoughts = f"{begun}Maybe\n{answer}\n</think>\n"
        whole, cut, silent, endless, *shorter = await rewards(
            name,
            [
                (f"{thoughts}{answer}", opened, False),
                (f"{thoughts}{answer}", opened, True),
                (f"{thoughts}I don't know", opened, False),
                (f"{begun}Maybe\n{answer}\n", opened, False),
                *((f"{thoughts}{answer}"[:end], opened, True) for end in range(1, len(thoughts + answer.rstrip()))),
            ],
        )
        assert whole == 1.0
        assert cut == (0.0 if name in WHOLE else 1.0)
        assert silent < 0.5
        assert endless == 0.0
        # Of what is compared word by word a part is worth a part.
        assert max(shorter) < 1.0 if name == "jaccard" else not any(shorter)


@pytest.mark.parametrize(
    ("name", "response"),
    [
        ("math marker", "The answer is 42|0."),
        ("math marker", "The answer is 42|"),
        ("math line", "It is\n42|0"),
        ("choice", "Answer: B| or C"),
        ("choice line", "Rome| or Oslo"),
        ("string", "Rome|, perhaps"),
        ("string tag", "<answer>Rome|, perhaps</answer>"),
    ],
)
async def test_the_beginning_of_another_answer_is_not_paid(name: str, response: str) -> None:
    assert await rewards(name, [(response.partition("|")[0], False, True)]) == [0.0]


@pytest.mark.slow
async def test_programs_in_unfinished_thoughts_are_not_run() -> None:
    right = "```python\ndef f(x):\n    return 2 * x\n```\n"
    environment = CodeExecutionEnvironment({})
    try:
        for fields, wanted in [
            ({"content": f"<think>{right}", "thoughts": 7 + len(right)}, 0.0),
            ({"content": right, "thoughts": len(right)}, 0.0),
            ({"content": right[:-4], "truncated": True}, 0.0),
            ({"content": f"{right}```python\ndef f(x", "truncated": True}, 1.0),
            ({"content": f"a</think>{right}", "thoughts": 9, "truncated": True}, 1.0),
        ]:
            returned = await environment.step([[{"role": "assistant", **fields}]], [dict(PROGRAM)])
            assert list(returned.rewards) == [wanted], fields
    finally:
        environment.shutdown()


@pytest.mark.parametrize("opened", [False, True])
async def test_calls_in_unfinished_thoughts_are_not_made(opened: bool) -> None:
    given = sample(prompt="What?\n<think>\n" if opened else "What?\n", metadata={"wanted": {"pear": 1}})
    shop = Shop({})
    tools = [function.schema for function in shop.functions.values()]

    class Rows(Shop):
        def reset(self, episodes: Any) -> Any:
            return [None for _ in episodes]

    given = dataclasses.replace(given, prompt=dataclasses.replace(given.prompt, tools=tools))
    begun = "" if opened else "<think>"
    for response, cut, paid in [
        (f"{begun}I could {BUY}", True, False),
        (f"{begun}I could {BUY}", False, False),
        (f"{begun}Hm</think>{BUY}", False, True),
        (f"{begun}Hm</think>{BUY[:-1]}", True, False),
    ]:
        (record,) = await roll(
            [given],
            policy=ScriptedPolicy(lambda request, response=response: response if "-1-" in request.request_id else "."),  # type: ignore[misc]
            environments={"env": Rows({})},
            sampling=SamplingParameters(max_tokens=len(response) + (not cut)),
            max_sequence_length=4000,
        )
        assert record.total_reward == float(paid), response
        assert bool(record.messages[1].fields.get("tool_calls")) is paid
        line = encode_line(record)
        assert encode_line(decode_line(line, TrajectoryRecord, where="x")) == line


async def test_a_move_in_unfinished_thoughts_is_not_made_and_they_go_on_after_the_answer() -> None:
    said = iter(["I could <action>stand</action>", "but I <action>hit</action>", "no.</think><action>stand</action>"])
    environment = BlackjackEnvironment({})
    row = environment.generate_dataset(1, 1)[0]
    (record,) = await roll(
        [sample(prompt="Play.\n<think>\n", metadata=row["metadata"])],
        policy=ScriptedPolicy(lambda _: next(said, "no")),
        environments={"env": environment},
        sampling=SamplingParameters(max_tokens=100),
        max_sequence_length=4000,
        max_turns=3,
    )
    responses = [message for message in record.messages if message.sampled]
    assert [message.fields["thoughts"] == len(message.content) for message in responses] == [True, True, False]
    assert record.stop_reason == "terminated"
    assert responses[2].content[responses[2].fields["thoughts"] :] == "<action>stand</action>"


async def test_a_response_without_thoughts_stores_nothing_of_them() -> None:
    (record,) = await roll([sample()], policy=ScriptedPolicy(lambda _: "4 > 3"))
    assert not any(isinstance(message, ExtendedMessage) for message in record.messages)


async def test_environments_are_told_where_thoughts_end_and_what_was_cut_off() -> None:
    seen: list[Any] = []

    class Seen(CountingEnvironment):
        def step(self, logs: Any, metadata: Any) -> Any:
            seen.append(logs[0][-1])
            return super().step(logs, metadata)

    for response, tokens in (("<think>a</think>b", 100), ("<think>abc", 10), ("b", 100), ("bc", 2)):
        await roll(
            [sample(metadata={"turns": 1})],
            policy=ScriptedPolicy(lambda _, response=response: response),  # type: ignore[misc]
            environments={"env": Seen()},
            sampling=SamplingParameters(max_tokens=tokens),
        )
    said = {"role": "assistant"}
    assert seen == [
        {**said, "content": "<think>a</think>b", "thoughts": 16},
        {**said, "content": "<think>abc", "thoughts": 10, "truncated": True},
        {**said, "content": "b"},
        {**said, "content": "bc", "truncated": True},
    ]


@pytest.mark.parametrize("text", ["<think>[[A]]", "maybe [[A]]</think>", "<think>[[A]]</think>I don't know"])
def test_a_judge_s_unfinished_thoughts_have_no_verdict(text: str) -> None:
    assert Labels({"[[A]]": 1.0}).read(text) is None
    assert JsonLabels({"[[A]]": 1.0}).read(text.replace("[[A]]", '{"verdict": "[[A]]"}')) is None
    assert Scale(r"\[\[(\d)\]\]", 0, 9).read(text.replace("A", "7")) is None
