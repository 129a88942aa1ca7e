"""vLLM's own parsers, by their names, on whole responses; no engine is started."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kuberoll_workers.data.tool_calls import ToolCalls
from kuberoll_workers.serving.engines.tool_parser import ToolParser, UnusableParser
from tests.data.support import model

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
    # vLLM then reads none of the others.
    found = parser("hermes").parse(f"{good}<tool_call>{{add}}</tool_call>", [ADD])
    assert found.calls == []
    assert [call.error[:35] for call in found.invalid] == [
        "it is not JSON: Expecting property ",
        "another call of this response canno",
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
