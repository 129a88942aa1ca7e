"""Every form of a row, and every way in which a row can be wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.model.dataset import PromptTemplate
from kuberoll_workers.dataset.rows import DatasetError, Row, RowPosition, parse_row

PLACE = RowPosition("rows.jsonl:", 2)


def parse(row: Any, names: tuple[str, ...] = ("a",), template: dict[str, str] | None = None) -> Row:
    given = None if template is None else PromptTemplate.model_validate(template)
    return parse_row(row, place=PLACE, task_names=names, template=given)


def refusal(row: Any, names: tuple[str, ...] = ("a", "b"), template: dict[str, str] | None = None) -> str:
    with pytest.raises(DatasetError) as caught:
        parse(row, names, template)
    text = str(caught.value)
    assert text.startswith("rows.jsonl:2: ")
    return text.removeprefix("rows.jsonl:2: ")


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def gym(row: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": "2+2?", **params}, **(row or {})}


def batch(row: dict[str, Any] | None = None, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": "r-1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [user("2+2?")], **body},
        **(row or {}),
    }


def test_a_row_with_everything() -> None:
    row = parse(
        {
            "messages": [{"role": "system", "content": "Be brief."}, user("2+2?")],
            "task_name": "b",
            "task_id": "sum-1",
            "metadata": {"ground_truth": 4},
            "stop_strings": ["</answer>"],
            "sampling": {"maxTokens": 5, "top_p": 0.5},
            "idx": [1, 2],
        },
        ("a", "b"),
    )
    assert row.where == "rows.jsonl:2"
    assert [message["role"] for message in row.messages] == ["system", "user"]
    assert (row.task_name, row.task_id, row.idx) == ("b", "sum-1", [1, 2])
    assert row.metadata == {"ground_truth": 4}
    assert row.stop_strings == ("</answer>",)
    assert row.sampling == {"max_tokens": 5, "top_p": 0.5}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?"},
        {"prompt": [user("2+2?")]},
        {"messages": [user("2+2?")]},
        {"messages": [user([{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}])]},
        {"messages": [user(["2+", "2?"])]},
        {"messages": [{"role": "user", "content": "2+2?", "name": None, "tool_calls": None}], "tools": None},
        gym(),
        gym(input=[user("2+2?")]),
        gym(input=[{"type": "message", "id": "m1", "status": "completed", **user("2+2?")}]),
        gym(input=[user([{"type": "input_text", "text": "2+2?"}])], tools=[], parallel_tool_calls=True, model="m"),
        batch(),
        batch(n=1, tools=[], stream=False),
        {"custom_id": "r-1", "url": "/v1/responses", "body": {"input": "2+2?"}},
    ],
)
def test_the_same_prompt_in_every_form(row: dict[str, Any]) -> None:
    assert parse(row).messages == [user("2+2?")]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "developer", "content": "Be brief."}, user("x")]},
        gym(input=[{"role": "developer", "content": "Be brief."}, user("x")]),
        gym(input="x", instructions="Be brief."),
        batch(messages=[{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, user("x")]),
    ],
)
def test_developers_and_instructions_are_the_system(row: dict[str, Any]) -> None:
    assert parse(row).messages == [{"role": "system", "content": "Be brief."}, user("x")]


def test_a_template_fills_fields() -> None:
    template = {"system": "Be {{brief}}.", "user": "Q: {question[text]}"}
    for row in (
        {"question": {"text": "2+2"}},
        {"question": {"text": "2+2"}, "responses_create_params": {"top_p": 0.5}},
    ):
        messages = parse(row, template=template).messages
        assert [(m["role"], m["content"]) for m in messages] == [("system", "Be {brief}."), ("user", "Q: 2+2")]


def test_gym_rows_name_their_environment_task_and_sampling() -> None:
    row = parse(
        gym(
            {"agent_ref": {"type": "responses_api_agents", "name": "b"}, "_ng_task_index": 7, "_ng_rollout_index": 1},
            temperature=0.5, top_p=0.9, max_output_tokens=64,
        ),
        ("a", "b"),
    )  # fmt: skip
    assert (row.task_name, row.task_id, row.idx) == ("b", 7, 7)
    assert row.sampling == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 64}
    assert row.metadata is None


def test_gym_s_environments_get_the_row() -> None:
    row = parse(gym({"expected_answer": "4", "verifier_metadata": {"kind": "sum"}, "metadata": {"level": 1}, "idx": 3}))
    assert row.metadata == {"expected_answer": "4", "verifier_metadata": {"kind": "sum"}, "level": 1}
    assert parse(gym({"uuid": "u", "metadata": {"uuid": "u"}})).metadata == {"uuid": "u"}


def test_the_rollouts_that_gym_numbered_are_of_one_task() -> None:
    first, second = (
        parse(gym({"_ng_task_index": 7, "_ng_rollout_index": n, "_ng_rollout_id": f"7-{n}"})) for n in range(2)
    )
    assert first.content == second.content
    assert first.content != parse(gym({"_ng_task_index": 8})).content


def test_batch_requests_name_their_row_sampling_and_stop_strings() -> None:
    row = parse(batch({"metadata": {"ground_truth": 4}}, temperature=0, max_completion_tokens=9, stop="\n"))
    assert (row.idx, row.task_id) == ("r-1", None)
    assert row.sampling == {"temperature": 0, "max_tokens": 9}
    assert row.stop_strings == ("\n",)
    assert row.metadata == {"ground_truth": 4}


def test_the_row_s_own_settings_go_before_those_of_its_request() -> None:
    row = parse(batch({"sampling": {"topP": 0.1}, "stop_strings": ["."]}, top_p=0.9, temperature=0.5, stop=["\n"]))
    assert row.sampling == {"top_p": 0.1, "temperature": 0.5}
    assert row.stop_strings == (".",)


def test_null_fields_count_as_absent() -> None:
    given = {"prompt": "x", "sampling": {"temperature": 0.5}, "metadata": {"a": 1}}
    nulls = {
        **given, "messages": None, "task_id": None, "idx": None, "stop_strings": None, "body": None,
        "responses_create_params": None, "sampling": {"temperature": 0.5, "top_p": None},
    }  # fmt: skip
    row, same = parse(given), parse(nulls)
    assert (row.content, row.sampling) == (same.content, same.sampling)
    # Templates ask whether a message has a field.
    messages = parse({"messages": [{"role": "user", "content": "x", "name": None, "tool_calls": None}]}).messages
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"prompt": "x", "idx": 1}, {"idx": 1, "prompt": "x"}, True),
        ({"prompt": "x", "idx": 1}, {"prompt": "x", "idx": 1.0}, True),
        (
            {"prompt": "x", "metadata": {"b": [{"c": None, "d": 2}]}},
            {"prompt": "x", "metadata": {"b": [{"d": 2}]}},
            True,
        ),
        ({"prompt": "x", "metadata": {"b": [None]}}, {"prompt": "x", "metadata": {"b": []}}, False),
        ({"prompt": "x", "idx": 1}, {"prompt": "x", "idx": 2}, False),
        ({"prompt": "x", "idx": 1}, {"prompt": "x", "idx": "1"}, False),
        ({"prompt": "x", "idx": 1}, {"prompt": "x", "idx": True}, False),
    ],
)
def test_what_makes_rows_equal(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    assert (parse(one).content == parse(other).content) is same


def test_content_is_the_whole_row() -> None:
    row = {"prompt": "x", "unread": {"b": [1.5, None], "a": "é"}}
    assert json.loads(parse(row).content) == row


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "found a list; a row is a JSON object"),
        (None, "found nothing; a row is a JSON object"),
        ({"prompt": "x"}, "task_name is missing"),
        ({"prompt": "x", "task_name": "chess"}, "task_name: found 'chess'; the job's environments are a, b"),
        ({"prompt": "x", "task_name": ["a"]}, "task_name: found ['a']"),
        ({"task_name": "a"}, "messages and prompt are missing"),
        ({"task_name": "a", "prompt": "x", "messages": []}, "messages and prompt exclude each other"),
        ({"task_name": "a", "messages": []}, "messages: found an empty list; it must be a list of at least"),
        ({"task_name": "a", "prompt": 3}, "prompt: found a number 3"),
        ({"task_name": "a", "messages": ["x"]}, 'messages[0]: found text "x"'),
        ({"task_name": "a", "messages": [{"role": "user"}]}, "messages[0].content: found nothing"),
        ({"task_name": "a", "messages": [{"content": "x"}]}, "messages[0]: a message is an object with a role"),
        ({"task_name": "a", "messages": [user([])]}, "messages[0].content: found an empty list"),
        (
            {"task_name": "a", "messages": [user("x"), user([{"type": "image_url", "image_url": {"url": "u"}}])]},
            "messages[1].content[0]: found a part of type 'image_url'",
        ),
        (
            {"task_name": "a", "messages": [user("x"), {"role": "assistant", "content": "y"}]},
            "messages[1]: the last message is the assistant's",
        ),
        ({"task_name": "a", "messages": [user("x")], "tools": [{"type": "function"}]}, "tools: tools are not"),
        ({"task_name": "a", "prompt": "x", "metadata": 3}, "metadata: found a number 3"),
        ({"task_name": "a", "prompt": "x", "task_id": True}, "task_id: found a boolean true"),
        ({"task_name": "a", "prompt": "x", "task_id": ""}, 'task_id: found text ""'),
        ({"task_name": "a", "prompt": "x", "task_id": 1.5}, "task_id: found a number 1.5"),
        ({"task_name": "a", "prompt": "x", "stop_strings": "</a>"}, 'stop_strings: found text "</a>"'),
        ({"task_name": "a", "prompt": "x", "sampling": [1]}, "sampling: found a list"),
        ({"task_name": "a", "prompt": "x", "sampling": {"temprature": 1}}, "sampling.temprature: unknown; a row may"),
        ({"task_name": "a", "prompt": "x", "sampling": {"topP": 2}}, "sampling.topP: found a number 2; input"),
        ({"task_name": "a", "prompt": "x", "sampling": {"seed": 1}}, "sampling.seed: unknown"),
        ({"task_name": "a", "prompt": "x", "idx": 2**70}, "the row cannot be written as JSON: Integer exceeds 64-bit"),
        ({"task_name": "a", "prompt": "x", "metadata": {"a": "\ud800"}}, "the row cannot be written as JSON"),
        ({"task_name": "a", "prompt": "x", "idx": float("nan")}, "the row cannot be written as JSON: found nan"),
        (gym({"agent_ref": {"name": "chess"}}), "agent_ref.name: found 'chess'; the job's environments are a, b"),
        (gym({"agent_ref": {}}), "agent_ref.name is missing"),
        (gym({"agent_ref": "é"}), 'agent_ref: found text "é"'),
        (gym({"agent_ref": {"name": None, "type": ""}}), "agent_ref.name is missing"),
        (gym({"agent_ref": "a"}), 'agent_ref: found text "a"'),
        (gym({"task_name": "a", "_ng_task_index": True}), "_ng_task_index: found a boolean true"),
        (
            gym({"task_name": "a", "level": 1, "metadata": {"level": 2}}),
            "metadata.level: the row also has a different level",
        ),
        ({"task_name": "a", "responses_create_params": 1}, "responses_create_params: found a number 1"),
        (gym(input=[]), "responses_create_params.input: found an empty list"),
        (gym(input=3), "responses_create_params.input: found a number 3"),
        (gym(messages=[user("x")]), "responses_create_params: messages and input exclude each other"),
        (gym(instructions=["x"]), "responses_create_params.instructions: found a list"),
        (gym(input=[{"type": "function_call"}]), "responses_create_params.input[0]: found an item of type 'function"),
        (
            gym(input=[user([{"type": "input_image", "image_url": "u"}])]),
            "responses_create_params.input[0].content[0]: found a part of type 'input_image'",
        ),
        (gym(tools=[{"type": "function"}]), "responses_create_params.tools: tools are not supported"),
        (gym(seed=1), "responses_create_params.seed: a row cannot set it"),
        (gym(reasoning={"effort": "low"}), "responses_create_params.reasoning: not supported"),
        (gym(metadata={"extra_body": '{"top_k": 1}'}), "responses_create_params.metadata.extra_body: not read"),
        (gym({"task_name": "a"}, temperature=3), "responses_create_params.temperature: found a number 3"),
        (batch(n=4), "body.n: the number of samples is the job's dataset.repeats"),
        (batch(response_format={"type": "json_object"}), "body.response_format: not supported"),
        (batch({"task_name": "a"}, stop=[1]), "body.stop: found a list; it must be a list of texts"),
        ({"custom_id": "1", "body": {"prompt": "x"}}, "body: messages and input are missing"),
    ],
)  # fmt: skip
def test_unusable_rows_name_the_row_and_the_field(row: Any, message: str) -> None:
    assert refusal(row).startswith(message)


def test_a_parameter_s_mistake_is_said_in_the_row_s_words() -> None:
    assert refusal(gym({"task_name": "a"}, max_output_tokens=0)).startswith(
        "responses_create_params.max_output_tokens: "
    )
    assert refusal({"task_name": "a", "prompt": "x", "sampling": {"top_p": 2}}).startswith("sampling.top_p: ")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{question}", "uses {question}, which this row does not have"),
        ("{answer.text}", "cannot be filled: 'str' object has no attribute 'text'"),
        ("{answer[0][x]}", "cannot be filled"),
        ("{", "cannot be filled"),
    ],
)
def test_templates_that_a_row_cannot_fill(template: str, message: str) -> None:
    assert message in refusal({"task_name": "a", "answer": "4"}, template={"user": template})


def test_deep_rows_are_refused() -> None:
    row: dict[str, Any] = {}
    for _ in range(5000):
        row = {"a": row}
    assert refusal({"task_name": "a", "prompt": "x", "metadata": row}).startswith("the row cannot be written as JSON")


def test_the_rows_of_the_docs() -> None:
    page = Path(__file__).parents[2] / "docs" / "datasets.md"
    plain, of_gym, request = (
        json.loads(text) for text in re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL)
    )
    assert parse(plain, ("math", "other")).idx == 17
    assert parse(of_gym, ("math", "other")).metadata == {"expected_answer": "4"}
    assert parse(request).idx == "r-1"


@pytest.mark.parametrize(
    "name",
    [
        "background", "include", "logprobs", "metadata", "model", "parallel_tool_calls", "prompt_cache_key",
        "safety_identifier", "service_tier", "store", "stream", "stream_options", "tool_choice", "top_logprobs",
        "truncation", "user",
    ],
)  # fmt: skip
def test_parameters_that_change_no_token_are_passed_over(name: str) -> None:
    value: Any = {"x": "y"} if name == "metadata" else "x"
    assert parse(gym({"task_name": "a"}, **{name: value})).messages == parse(gym({"task_name": "a"})).messages
