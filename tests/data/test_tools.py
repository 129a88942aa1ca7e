"""Tools and calls are taken in the forms of the chat and Responses APIs, and refused by their place otherwise."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.data.thoughts import thoughts_end
from kuberoll_workers.data.tool_calls import (
    MAX_CALLS,
    ToolCalls,
    checked_call,
    in_order_of_calls,
    message_fields,
    parse_tool_calls,
)
from kuberoll_workers.data.tools import (
    InvalidTools,
    checked_calls,
    checked_tools,
    template_messages,
    tool_call,
)
from kuberoll_workers.environments.outcome import MAX_MESSAGES
from tests.examples import examples

ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


def test_the_responses_api_s_form_is_converted_and_the_chat_api_s_kept() -> None:
    flat = {"type": "function", **ADD["function"], "strict": True}
    assert checked_tools([flat], "tools") == [ADD]
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    assert checked_tools([strict], "tools") == [strict]
    assert checked_tools([{"type": "function", "function": {"name": "now", "description": None}}], "tools") == [
        {"type": "function", "function": {"name": "now"}}
    ]


def test_a_copy_is_made() -> None:
    given = [json.loads(json.dumps(ADD))]
    checked = checked_tools(given, "tools")
    given[0]["function"]["name"] = "subtract"
    assert checked == [ADD]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "tools: found dict {}; it must be a list of functions"),
        (["add"], "tools[0]: found str 'add'; a tool is an object"),
        ([{"function": {"name": "add"}}], "tools[0].type: found NoneType None; only tools of type 'function'"),
        ([{"type": "web_search"}], "tools[0].type: found str 'web_search'; only tools of type 'function'"),
        ([{"type": "function", "function": "add"}], "tools[0].function: found str 'add'"),
        ([{"type": "function", "function": {}}], "tools[0].function.name: found NoneType None; it must be a text"),
        ([{"type": "function", "name": ""}], "tools[0].name: found str ''; it must be a text of 1 to 256"),
        (
            [{"type": "function", "name": "a", "parameters": "x"}],
            "tools[0].parameters: found str 'x'; it must be a JSON",
        ),
        ([{"type": "function", "name": "a", "description": 1}], "tools[0].description: found int 1; it must be text"),
        ([ADD, ADD], "tools[1]: 'add' is already the name of tools[0]"),
        ([ADD] * 1001, "tools: found 1001 tools; at most 1000 are taken"),
        ([{"type": "function", "name": "a", "parameters": {"x": float("nan")}}], "tools[0].parameters.x is nan"),
        ([{"type": "function", "name": "a", "description": "x" * (1 << 20)}], "tools has 1048"),
    ],
)
def test_other_tools_are_refused_by_their_place(tools: Any, message: str) -> None:
    with pytest.raises(InvalidTools) as caught:
        checked_tools(tools, "tools")
    assert str(caught.value).startswith(message)


def test_calls_have_their_arguments_as_text_and_templates_get_objects() -> None:
    given = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
    (call,) = checked_calls([given], "calls")
    assert call == {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    (rendered, other) = template_messages([message, {"role": "user", "content": "x"}])
    assert rendered["tool_calls"] == [given]
    assert (other, message["tool_calls"]) == ({"role": "user", "content": "x"}, [call])
    assert checked_calls([{"function": {"name": "now", "arguments": ""}}], "calls") == [tool_call("now", {})]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("add", "calls: found str 'add'; it must be a list of calls"),
        ([{"name": "add"}], "calls[0]: found dict"),
        ([{"function": {"name": 1}}], "calls[0].function.name: found int 1"),
        ([{"function": {"name": "add", "arguments": "{"}}], "calls[0].function.arguments: Expecting property name"),
        ([{"function": {"name": "add", "arguments": "[1]"}}], "calls[0].function.arguments: found list [1]; they must"),
        ([{"id": 3, "function": {"name": "add", "arguments": "{}"}}], "calls[0].id: found int 3"),
    ],
)
def test_other_calls_are_refused_by_their_place(calls: Any, message: str) -> None:
    with pytest.raises(InvalidTools) as caught:
        checked_calls(calls, "calls")
    assert str(caught.value).startswith(message)


def names(found: ToolCalls) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found.calls]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', [("add", {"a": 1})]),
        ('Let me.\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>', [("add", {})]),
        ('<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
        ('<tool_call>{"name": "f", "parameters": {"b": [2]}}</tool_call>', [("f", {"b": [2]})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"b\\": 2}"}</tool_call>', [("f", {"b": 2})]),
        # A stop string, or the end of the model's turn, instead of the closing tag.
        ('<tool_call>\n{"name": "f", "arguments": {}}', [("f", {})]),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n<|im_end|>', [("f", {})]),
        (
            '<tool_call>{"name": "f"}</tool_call>\nand\n<tool_call>{"name": "g"}</tool_call>',
            [("f", {}), ("g", {})],
        ),
        # Thoughts call nothing.
        ('<think>or <tool_call>{"name": "f"}</tool_call></think>\n<tool_call>{"name": "g"}</tool_call>', [("g", {})]),
        ('so <tool_call>{"name": "f"}</tool_call> or</think>done', []),
        ('<think>maybe <tool_call>{"name": "f"}</tool_call>', []),
    ],
)  # fmt: skip
def test_calls_between_tags(text: str, calls: Any) -> None:
    found = parse_tool_calls(text)
    assert names(found) == calls
    assert found.invalid == []
    assert (found.text is None) == (not calls)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('Let me.\n<tool_call>{"name": "f"}</tool_call> Done.', "Let me.\n"),
        ('<tool_call>{"name": "f"}</tool_call>', ""),
        (
            '<think>or <tool_call></think>\nSo:<tool_call>{"name": "g"}</tool_call>',
            "<think>or <tool_call></think>\nSo:",
        ),
        ("Let me.<tool_call>{</tool_call>", None),
    ],
)
def test_the_text_beside_calls_is_that_before_the_first(text: str, said: str | None) -> None:
    """As vLLM's parser for these tags returns it; further text between or after calls is dropped."""
    found = parse_tool_calls(text)
    assert found.text == said
    assert message_fields(found, 1).get("text") == said


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>{name: add}</tool_call>", "it is not JSON: Expecting property name"),
        ("<tool_call></tool_call>", "it is not JSON: Expecting value"),
        ("<tool_call>", "it is not JSON: Expecting value"),
        (
            '<tool_call>{"name": "add"} {"name": "add"}</tool_call>',
            "it is not JSON: there is more text after the object",
        ),
        ('<tool_call>{"name": "add"} and then</tool_call>', "it is not JSON: there is more text after the object"),
        ('<tool_call>[{"name": "add"}]</tool_call>', "it is not a JSON object"),
        ('<tool_call>{"tool": "add"}</tool_call>', "the tool's name is missing"),
        ('<tool_call>{"name": 3}</tool_call>', "the tool's name is missing"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments must be a JSON object"),
        ('<tool_call>{"name": "add", "arguments": "1"}</tool_call>', "the arguments must be a JSON object"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "the arguments are not JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "the arguments.a is nan"),
        ('<tool_call>{"name": "%s"}</tool_call>' % ("x" * 300), "the name of the tool has 300 characters"),
        ('<tool_call>{"name": "a", "arguments": ' + '{"a":' * 5000, "it is not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(text: str, error: str) -> None:
    found = parse_tool_calls(text)
    assert found.calls == []
    (invalid,) = found.invalid
    assert invalid.error.startswith(error)
    assert len(invalid.text) < 2100


def test_one_wrong_call_does_not_cost_the_others() -> None:
    found = parse_tool_calls('<tool_call>{"name": "f"}</tool_call><tool_call>{</tool_call><tool_call>{"name": "g"}')
    assert names(found) == [("f", {}), ("g", {})]
    assert [call.text for call in found.invalid] == ["{"]


@pytest.mark.parametrize("other", ['{"name": "f"}', "{"])
def test_the_number_of_calls_is_bounded_so_that_all_can_be_answered(other: str) -> None:
    found = parse_tool_calls(f'<tool_call>{{"name": "f"}}</tool_call><tool_call>{other}</tool_call>' * 100)
    assert len(found) == MAX_CALLS == MAX_MESSAGES
    assert found.invalid[-1].error == "the response has more than 64 calls; this one and those after it were left out"
    assert len(message_fields(found, 1)["tool_calls"]) == (63 if other != "{" else 32)


@given(st.lists(st.booleans(), max_size=12), st.randoms(use_true_random=False))
def test_calls_and_their_answers_have_the_order_in_which_they_were_written(good: list[bool], draw: Random) -> None:
    text = "".join(f'<tool_call>{{"name": "f{number}"{"}" * one}</tool_call>' for number, one in enumerate(good))
    found = parse_tool_calls(text)
    assert [isinstance(call, dict) for call in found.in_order()] == good
    response = message_fields(found, 1)
    ids = [f"call001{number:02d}" for number in range(1, len(good) + 1)]
    answers: list[dict[str, str]] = [{"tool_call_id": name} for name in ids]
    draw.shuffle(answers)
    notes = [{"content": "note"}, {"tool_call_id": "another"}]
    for note in notes:
        answers.insert(draw.randint(0, len(answers)), note)
    ordered = in_order_of_calls(response, answers)
    assert [answer["tool_call_id"] for answer in ordered if answer.get("tool_call_id") in ids] == ids
    assert [ordered.index(note) for note in notes] == [answers.index(note) for note in notes]


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f"}', '{"name":', "{", "}", "\n"]
        )
        | st.text(max_size=5),
        max_size=12,
    ).map("".join)
)
def test_any_text_is_read_and_what_is_made_of_it_can_be_stored(text: str) -> None:
    found = parse_tool_calls(text)
    assert len(found) <= min(text.count("<tool_call>"), MAX_CALLS)
    assert bool(found) == ("<tool_call>" in text[thoughts_end(text) :])
    json.dumps(message_fields(found, 1))


def test_ids_are_the_policy_s_or_by_turn_and_number() -> None:
    calls = [checked_call("f", {}), {"id": "functions.f:0", **checked_call("f", {})}, checked_call("g", "{}")]
    fields = message_fields(ToolCalls([*calls, {"id": "functions.f:0", **calls[0]}, {"id": "<|x|>", **calls[0]}]), 7)
    assert [call["id"] for call in fields["tool_calls"]] == [
        "call00701", "functions.f:0", "call00703", "call00704", "call00705",
    ]  # fmt: skip
    assert set(fields) == {"tool_calls"}
    found = parse_tool_calls('<tool_call>{"name": "f"}</tool_call><tool_call>{')
    fields = message_fields(found, 2)
    assert fields["tool_calls"][0]["id"] == "call00201"
    assert fields["invalid_tool_calls"][0]["id"] == "call00202"
    assert message_fields(ToolCalls(), 1) == {}
