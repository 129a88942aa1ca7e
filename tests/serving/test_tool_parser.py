"""vLLM's own parsers, by their names, on whole responses; no engine is started."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.data.tool_calls import ToolCalls
from kuberoll_workers.serving.engines.payloads import hidden, shown
from kuberoll_workers.serving.engines.tool_parser import ToolParser, UnusableParser
from tests.data.support import byte_level, model, wrap
from tests.examples import examples

pytestmark = pytest.mark.slow

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def parser(name: str) -> ToolParser:
    return ToolParser(name, model("qwen2.5").hugging_face)


def calls(found: ToolCalls) -> list[Any]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found.calls]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
        ("qwen3_xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
         "</function>\n</tool_call>"),
        ("pythonic", "[add(a=1, b=2)]"),
        ("internlm", '<|action_start|><|plugin|>{"name": "add", "parameters": {"a": 1, "b": 2}}<|action_end|>'),
    ],
)  # fmt: skip
def test_calls_in_the_forms_of_several_families(name: str, text: str) -> None:
    found = parser(name).parse(text, [ADD])
    assert calls(found) == [("add", {"a": 1, "b": 2})]
    assert found.invalid == []
    assert "id" not in found.calls[0]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        ("internlm", '<|action_start|><|plugin|>{"name": "add", "parameters": {"a": 1}}<|action_end|>'),
    ],
)
def test_the_text_beside_calls_is_the_parsers(name: str, call: str) -> None:
    assert parser(name).parse(f"I add.{call}", [ADD]).text == "I add."
    assert parser(name).parse(f"<think>Hm.</think>I add.{call}", [ADD]).text == "<think>Hm.</think>I add."
    assert parser(name).parse(call, [ADD]).text == ""


def test_thoughts_call_nothing() -> None:
    text = '<think><tool_call>{"name": "add", "arguments": {}}</tool_call></think>3'
    assert parser("hermes").parse(text, [ADD]) == ToolCalls()


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml", "pythonic"])
@pytest.mark.parametrize("text", ["", "3", "The sum is 3.", "a < b"])
def test_a_text_without_calls_has_none(name: str, text: str) -> None:
    assert parser(name).parse(text, [ADD]) == ToolCalls()


def test_a_call_that_the_parser_gives_up_on_is_invalid() -> None:
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    found = parser("hermes").parse("<tool_call>{add}</tool_call>", [ADD])
    assert (found.calls, [call.text for call in found.invalid]) == ([], ["{add}"])
    assert found.invalid[0].error.startswith("it is not JSON: Expecting property name")
    found = parser("hermes").parse(f"{good}<tool_call>{{add}}</tool_call>", [ADD])
    assert calls(found) == [("add", {"a": 1})]
    assert [call.text for call in found.invalid] == ["{add}"]
    # vLLM's own for the same tags then reads none of the others.
    found = ToolParser("granite4", marked()).parse(f"{good}<tool_call>{{add}}</tool_call>", [ADD])
    assert found.calls == []
    assert [call.error[:35] for call in found.invalid] == [
        "another call of this response canno",
        "it is not JSON: Expecting property ",
    ]
    found = parser("hermes").parse('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [ADD])
    assert [call.error for call in found.invalid] == ["the arguments must be a JSON object"]


def test_a_parser_that_drops_what_it_cannot_read_is_found_out() -> None:
    found = parser("qwen3_xml").parse('<tool_call>\n{"name": "add"}\n</tool_call>', [ADD])
    assert (found.calls, len(found.invalid)) == ([], 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hermess", "vLLM has no tool parser 'hermess'; did you mean hermes? It has "),
        ("mistral", "mistral does not fit this model: "),
        ("openai", "openai does not read texts, but only works inside vLLM's own chat server"),
    ],
)
def test_an_unusable_parser_is_refused_when_the_engine_starts(name: str, message: str) -> None:
    with pytest.raises(UnusableParser) as caught:
        parser(name)
    assert str(caught.value).startswith(f"spec.generation.toolCallParser: {message}")


# Marks of all families' calls, as a payload may have them.
MARKS = [
    "<tool_call>", "</tool_call>", "<tool_calls>", "</tool_calls>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>",
    "<function=", "</function>", "<parameter=", "</parameter>", "</invoke>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_end|>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<seed:tool_call>", "</seed:tool_call>",
    "<|tool_call>", "<tool_call|>", "<|action_end|>", "<longcat_tool_call>", "</longcat_tool_call>", "</think>",
    "</minimax:tool_call>", "```", "}", "]", "{", "[", "'", ")]", '<|"|>', "</function>\n</tool_call>",
]  # fmt: skip


def marked() -> Any:
    """A tokenizer that has the tokens of all families."""
    return wrap(
        byte_level(["<|im_start|>", "<|im_end|>", *MARKS, "<minimax:tool_call>", "<|tool_call_argument_begin|>"]), None
    )


def tagged(values: dict[str, str], form: str) -> str:
    return "".join(form.format(name, value) for name, value in values.items())


# How a family writes a call of `run`, around it, and between several; None: it writes one.
FORMS: dict[str, Any] = {
    "llama3_json": lambda a: json.dumps({"name": "run", "parameters": a}),
    "mistral": lambda a: "[TOOL_CALLS]run" + json.dumps(a),
    "qwen3_coder": lambda a: "<tool_call>\n<function=run>\n" + tagged(a, "<parameter={}>\n{}\n</parameter>\n")
    + "</function>\n</tool_call>",
    "glm47": lambda a: "<tool_call>run\n" + tagged(a, "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n")
    + "</tool_call>",
    "kimi_k2": lambda a: "<|tool_calls_section_begin|><|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>"
    + json.dumps(a) + "<|tool_call_end|><|tool_calls_section_end|>",
    "internlm": lambda a: "<|action_start|><|plugin|>" + json.dumps({"name": "run", "parameters": a})
    + "<|action_end|>",
    "jamba": lambda a: "<tool_calls>" + json.dumps([{"name": "run", "arguments": a}]) + "</tool_calls>",
    "granite4": lambda a: "<tool_call>\n" + json.dumps({"name": "run", "arguments": a}) + "\n</tool_call>",
    "longcat": lambda a: "<longcat_tool_call>" + json.dumps({"name": "run", "arguments": a}) + "</longcat_tool_call>",
    "phi4_mini_json": lambda a: "functools" + json.dumps([{"name": "run", "arguments": a}]),
    "seed_oss": lambda a: "<seed:tool_call>\n<function=run>\n" + tagged(a, "<parameter={}>{}</parameter>\n")
    + "</function>\n</seed:tool_call>",
    "minimax_m2": lambda a: '<minimax:tool_call>\n<invoke name="run">\n'
    + tagged(a, '<parameter name="{}">{}</parameter>\n') + "</invoke>\n</minimax:tool_call>",
    "gemma4": lambda a: "<|tool_call>call:run{" + ",".join(f'{n}:<|"|>{v}<|"|>' for n, v in a.items())
    + "}<tool_call|>",
}  # fmt: skip
RUN = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}},
}


@pytest.mark.parametrize("name", FORMS)
def test_a_call_may_have_any_mark_in_its_arguments(name: str) -> None:
    made = ToolParser(name, marked())
    for mark in MARKS:
        values = {"cmd": f"echo {mark} end", "more": "x"}
        found = made.parse(FORMS[name](values), [RUN], thoughts=0)
        assert calls(found) == [("run", values)], mark
        assert found.invalid == []


@pytest.mark.parametrize("name", FORMS)
def test_a_cut_makes_no_call_that_is_not_whole(name: str) -> None:
    made = ToolParser(name, marked())
    values = {"cmd": "echo </function></tool_call></invoke> 12", "more": "x"}
    text = FORMS[name](values)
    for at in range(1, len(text) + 1):
        found = calls(made.parse(text[:at], [RUN], thoughts=0, cut=True))
        assert found in ([], [("run", values)]), text[:at]
    assert made.parse(text, [RUN], thoughts=0).calls


def test_brackets_of_a_value_are_the_parser_s() -> None:
    wanted = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "a": {"type": "array"}, "b": {"type": "object"}}}}}  # fmt: skip
    text = (
        "<tool_call>\n<function=f>\n<parameter=a>\n[1, [2]]\n</parameter>\n"
        '<parameter=b>\n{"c": "<d>"}\n</parameter>\n</function>\n</tool_call>'
    )
    found = ToolParser("qwen3_coder", marked()).parse(text, [wanted], thoughts=0)
    assert calls(found) == [("f", {"a": [1, [2]], "b": {"c": "<d>"}})]


@settings(max_examples=examples(200))
@given(st.lists(st.sampled_from([*MARKS, '"', "\\", "x", "\n", ",", "\ue0f0"]), max_size=12).map("".join))
def test_what_is_hidden_is_shown_again_and_has_its_length(text: str) -> None:
    assert len(hidden(text)) == len(text)
    if "\ue0f0" not in text:
        assert shown(hidden(text)) == text
    else:
        assert hidden(text) == text
