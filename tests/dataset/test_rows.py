"""Every form of a row, and every way in which a row can be wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic.alias_generators import to_camel

from kuberoll_api.model.dataset import PromptTemplate
from kuberoll_workers.dataset.columns import ColumnMap
from kuberoll_workers.dataset.gym_rows import row_of_dataset
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


FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", **FUNCTION, "strict": True}


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


def test_rows_of_agent_servers_are_kept_as_they_are() -> None:
    given = gym(
        {"zeta": None, "agent_ref": {"name": "mcqa_simple_agent"}, "alpha": 1.0},
        tools=[{"type": "function", "name": "b", "parameters": {"type": "object", "default": None}}],
        metadata={"extra_body": '{"top_k": 3}'},
    )

    def parse_for(row: dict[str, Any], *names: str, agents: tuple[str, ...]) -> Row:
        return parse_row(row, place=RowPosition("rows.jsonl:", 2), task_names=names, template=None, gym_agents=agents)

    # The agent is one of those behind the only environment with agent servers.
    row = parse_for(given, "math", "gym", agents=("gym",))
    assert row.task_name == "gym"
    assert row_of_dataset(row) == given
    assert list(row_of_dataset(row)) == ["responses_create_params", "zeta", "agent_ref", "alpha"]
    # An environment of the agent's name prevails.
    named = parse_for(given, "gym", "mcqa_simple_agent", agents=("gym", "mcqa_simple_agent"))
    assert named.task_name == "mcqa_simple_agent"
    assert (named.content, named.given is None) == (row.content, False)
    plain = parse_for(given, "gym", "mcqa_simple_agent", agents=("gym",))
    assert (plain.task_name, plain.given) == ("mcqa_simple_agent", None)
    with pytest.raises(DatasetError, match=r"agent_ref\.name: found 'mcqa_simple_agent'"):
        parse_for(given, "one", "two", agents=("one", "two"))


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


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_a_row_s_seed_is_the_base_of_its_samples_in_every_form(seed: int) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "x", "sampling": {"seed": seed}},
        gym(seed=seed),
        gym(metadata={"extra_body": json.dumps({"seed": seed})}),
        batch(seed=seed),
    ]
    assert [(parse(row).seed, parse(row).sampling) for row in rows] == [(seed, {})] * 4


def test_the_seeds_that_gym_numbered_rollouts_with_make_no_other_rows() -> None:
    rows = [parse(gym({"_ng_task_index": 3, "_ng_rollout_index": n}, seed=n, temperature=0.5)) for n in range(3)]
    rows.append(parse(gym({"_ng_task_index": 3, "_ng_rollout_index": 0}, temperature=0.5)))
    assert {(row.seed, row.content) for row in rows} == {(None, rows[0].content)}
    extra = [
        parse(gym({"_ng_task_index": 3, "_ng_rollout_index": n}, metadata={"extra_body": json.dumps({"seed": n})}))
        for n in range(3)
    ]
    assert len({(row.seed, row.content) for row in extra}) == 1


def test_gym_s_extra_settings_are_sampling() -> None:
    assert parse(gym(metadata={"extra_body": '{"stop": "END"}'})).stop_strings == parse(gym(stop="END")).stop_strings
    assert parse(gym(metadata={"extra_body": '{"stop": ["a", "b"]}'})).stop_strings == ("a", "b")
    row = parse(gym(metadata={"extra_body": '{"top_k": 5, "min_p": 0.1}'}))
    assert row.sampling == {"top_k": 5, "min_p": 0.1}


SETTINGS: dict[str, Any] = {
    "min_p": 0.1,
    "presence_penalty": -1.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.2,
    "min_tokens": 3,
    "stop_token_ids": [1, 2],
    "structured_outputs": {"json": {"type": "object"}},
}


def test_rows_set_what_the_job_sets() -> None:
    camel = {to_camel(name): value for name, value in SETTINGS.items()}
    for row in ({"prompt": "x", "sampling": SETTINGS}, {"prompt": "x", "sampling": camel}, gym(**SETTINGS)):
        assert parse(row).sampling == SETTINGS


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
        (
            {"task_name": "a", "messages": [user("x")], "tools": [{"type": "function"}]},
            "tools[0].name: found NoneType None; it must be a text of 1 to 256 characters. A tool is",
        ),
        ({"task_name": "a", "prompt": "x", "tools": "[{"}, "tools: found text that is not JSON"),
        ({"task_name": "a", "prompt": "x", "tools": "search"}, "tools: found text that is not JSON"),
        ({"task_name": "a", "prompt": "x", "functions": [{"name": "f"}]}, "functions: the old name of tools"),
        (
            {"messages": [user("x"), {"role": "assistant", "tool_calls": [{"function": {}}]}, user("y")]},
            "messages[1].tool_calls[0].function.name: found NoneType None",
        ),
        ({"task_name": "a", "prompt": "x", "metadata": 3}, "metadata: found a number 3"),
        ({"task_name": "a", "prompt": "x", "task_id": True}, "task_id: found a boolean true"),
        ({"task_name": "a", "prompt": "x", "task_id": ""}, 'task_id: found text ""'),
        ({"task_name": "a", "prompt": "x", "task_id": 1.5}, "task_id: found a number 1.5"),
        ({"task_name": "a", "prompt": "x", "stop_strings": "</a>"}, 'stop_strings: found text "</a>"'),
        ({"task_name": "a", "prompt": "x", "sampling": [1]}, "sampling: found a list"),
        ({"task_name": "a", "prompt": "x", "sampling": {"temprature": 1}}, "sampling.temprature: unknown; a row may"),
        ({"task_name": "a", "prompt": "x", "sampling": {"topP": 2}}, "sampling.topP: found a number 2; input"),
        ({"task_name": "a", "prompt": "x", "sampling": {"override": True}}, "sampling.override: unknown"),
        ({"task_name": "a", "prompt": "x", "sampling": {"seed": -1}}, "sampling.seed: found a number -1"),
        (
            {"task_name": "a", "prompt": "x", "sampling": {"structured_outputs": {"regex": "a", "choice": ["b"]}}},
            "sampling.structured_outputs: found an object; set one of json, regex, choice, grammar; found regex and",
        ),
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
        (gym(input=3), "responses_create_params.input: found a number 3"),
        (gym(messages=[user("x")]), "responses_create_params: messages and input exclude each other"),
        (gym(instructions=["x"]), "responses_create_params.instructions: found a list"),
        (gym(input=[{"type": "function_call"}]), "responses_create_params.input[0].name: found NoneType None"),
        (
            gym(input=[{"type": "function_call_output", "call_id": "c"}]),
            "responses_create_params.input[0].output: found NoneType None; it must be text or a list",
        ),
        (
            gym(input=[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}, user("x")]),
            "responses_create_params.input[0].tool_calls[0].function.arguments: Expecting property name",
        ),
        (
            gym(input=[{"type": "reasoning", "summary": [{"type": "image"}]}]),
            "responses_create_params.input[0]: its part 0 is dict",
        ),
        (
            gym(input=[{"type": "web_search_call"}]),
            "responses_create_params.input[0]: found an item of type 'web_search_call'; a prompt consists of messages",
        ),
        (
            gym(tools=[TOOL], tool_choice="required"),
            'responses_create_params.tool_choice: found text "required"; only auto is supported, where the policy '
            "decides whether it calls a tool: remove it, and for none the tools, too",
        ),
        (
            gym(input=[user([{"type": "input_image", "image_url": "u"}])]),
            "responses_create_params.input[0].content[0]: found a part of type 'input_image'",
        ),
        (gym(functions=[{"name": "f"}]), "responses_create_params.functions: "),
        (
            gym({"task_name": "a"}, tools=[{"type": "web_search"}]),
            "responses_create_params.tools[0].type: found str 'web_search'; only tools of type 'function'",
        ),
        (gym({"task_name": "a"}, seed=True), "responses_create_params.seed: found a boolean true"),
        (gym(metadata={"extra_body": "top_k: 1"}), "responses_create_params.metadata.extra_body: found text"),
        (gym(metadata={"extra_body": {"top_k": 1}}), "responses_create_params.metadata.extra_body: found an object"),
        (gym(metadata={"extra_body": "[1]"}), "responses_create_params.metadata.extra_body: found text"),
        (
            gym(metadata={"extra_body": '{"logit_bias": {"1": 2}}'}),
            "responses_create_params.metadata.extra_body.logit_bias: not supported",
        ),
        (
            gym(seed=1, metadata={"extra_body": '{"seed": 2}'}),
            "responses_create_params.metadata.extra_body.seed: responses_create_params.seed is another value",
        ),
        (gym({"task_name": "a"}, temperature=3), "responses_create_params.temperature: found a number 3"),
        (batch(messages=[user(3)]), "body.messages[0].content: found a number 3"),
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
    pages = Path(__file__).parents[2] / "docs" / "reference"
    shown = (pages / "datasets.md").read_text() + (pages / "dataset-forms.md").read_text()
    plain, of_gym, request = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", shown, re.DOTALL))
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


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "tools": [{"type": "function", "function": FUNCTION}]},
        {"prompt": "2+2?", "tools": [TOOL]},
        {"prompt": "2+2?", "tools": json.dumps([TOOL])},
        gym(tools=[TOOL], tool_choice="auto", parallel_tool_calls=False),
        batch(tools=[{"type": "function", "function": FUNCTION}]),
    ],
)
def test_tools_of_a_row(row: dict[str, Any]) -> None:
    assert parse(row).tools == [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize("row", [{"prompt": "x", "tools": []}, {"prompt": "x", "tools": ""}, gym(tools=None), gym()])
def test_a_row_without_tools_declares_none(row: dict[str, Any]) -> None:
    assert parse(row).tools is None


def test_a_field_called_tools_may_be_data() -> None:
    row = parse(gym({"tools": ["hammer"]}, tools=[TOOL]))
    assert row.metadata == {"tools": ["hammer"]}
    assert row.tools is not None
    mapped = parse_row(
        {"question": "2+2?", "tools": ["hammer"]},
        place=PLACE,
        task_names=("a",),
        template=None,
        columns=ColumnMap({"prompt": "question", "metadata.tools": "tools"}),
    )
    assert (mapped.tools, mapped.metadata) == (None, {"tools": ["hammer"]})
    mapped = parse_row(
        {"question": "2+2?", "functions_offered": json.dumps([TOOL])},
        place=PLACE,
        task_names=("a",),
        template=None,
        columns=ColumnMap({"prompt": "question", "tools": "functions_offered"}),
    )
    assert mapped.tools == [{"type": "function", "function": FUNCTION}]


def test_items_of_the_responses_api_are_messages() -> None:
    def call(name: str, number: int) -> dict[str, Any]:
        return {
            "type": "function_call",
            "call_id": f"c{number}",
            "name": name,
            "arguments": '{"a": 1}',
            "status": "done",
        }

    def made(name: str, number: int) -> dict[str, Any]:
        return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}

    items = [
        {"role": "developer", "content": "Be brief."},
        user("2+2?"),
        {
            "type": "reasoning",
            "id": "r",
            "summary": [{"type": "summary_text", "text": "Add."}],
            "encrypted_content": "x",
        },
        call("add", 1),
        call("check", 2),
        {"type": "function_call_output", "call_id": "c1", "output": "4", "id": "o", "status": "completed"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "yes"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4."}]},
        call("add", 3),
        {"type": "function_call_output", "call_id": "c3", "output": "5"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        user("And 3+3?"),
    ]
    assert parse(gym(input=items, tools=[TOOL])).messages == [
        {"role": "system", "content": "Be brief."},
        user("2+2?"),
        {"role": "assistant", "content": "<think>Add.</think>", "tool_calls": [made("add", 1), made("check", 2)]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "tool", "content": "yes", "tool_call_id": "c2"},
        {"role": "assistant", "content": "4.", "tool_calls": [made("add", 3)]},
        {"role": "tool", "content": "5", "tool_call_id": "c3"},
        user("And 3+3?"),
    ]


def test_calls_in_chat_messages_are_taken_in_both_forms_of_arguments() -> None:
    for arguments in ('{"a": 1}', {"a": 1}):
        calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}]
        row = parse(
            {
                "messages": [
                    user("2+2?"),
                    {"role": "assistant", "content": None, "tool_calls": calls},
                    {"role": "tool", "tool_call_id": "c", "content": "4"},
                ]
            }
        )
        assert row.messages[1] == {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        }


@pytest.mark.parametrize("row", [gym(input=[]), gym(input=[], tools=[TOOL]), {"messages": []}])
def test_a_prompt_may_be_empty_where_reset_gives_it(row: dict[str, Any]) -> None:
    assert parse(row).messages == []


def test_a_template_fills_an_empty_input() -> None:
    assert parse(gym({"question": "2+2?"}, input=[]), template={"user": "{question}"}).messages == [user("2+2?")]


def test_reasoning_effort_is_the_job_s() -> None:
    assert parse(gym(reasoning={"effort": "low"})).sampling == {}


def test_a_data_field_called_task_name_is_not_the_environment_s() -> None:
    row = parse(gym({"task_name": "Text to JSON", "agent_ref": {"name": "b"}}), ("a", "b"))
    assert (row.task_name, row.metadata) == ("b", {"task_name": "Text to JSON"})
    row = parse(gym({"task_name": "bbq"}))
    assert (row.task_name, row.metadata) == ("a", {"task_name": "bbq"})
    assert parse(gym({"task_name": "a", "agent_ref": {"name": "b"}}), ("a", "b")).task_name == "a"
