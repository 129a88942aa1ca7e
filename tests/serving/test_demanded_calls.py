"""Calls of tools that a request demands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kuberoll_workers.serving.openai_api.demanded_calls import demand_of, read_demanded


@pytest.mark.parametrize(
    ("choice", "demand"),
    [
        (None, None),
        ("auto", None),
        ("none", None),
        ("required", ""),
        ({"type": "auto"}, None),
        ({"type": "any"}, ""),
        ({"type": "function", "function": {"name": "look"}}, "look"),
        ({"type": "function", "name": "look"}, "look"),
        ({"type": "tool", "name": "look"}, "look"),
        ({"type": "function"}, None),
        (["required"], None),
    ],
)
def test_each_api_demands_in_its_own_form(choice: Any, demand: str | None) -> None:
    assert demand_of({"tool_choice": choice}) == demand


def called(text: str, demand: str) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in read_demanded(text, demand)]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def test_calls_that_are_plain_json() -> None:
    assert called(' {"at": 1}\n', "look") == [("look", {"at": 1})]
    text = '[{"name": "look", "parameters": {"at": 1}}, {"name": "go"}]'
    assert called(text, "") == [("look", {"at": 1}), ("go", {})]


@pytest.mark.parametrize("text", ["", "no", '{"at": 1', '{"at": 1}', "[1]", '[{"parameters": {}}]', '["look"]', "7"])
def test_what_cannot_be_read_calls_nothing(text: str) -> None:
    assert called(text, "") == []


@pytest.mark.parametrize("text", ["", "[]", "7", '{"at": 1'])
def test_arguments_that_are_no_object_call_nothing(text: str) -> None:
    assert called(text, "look") == []
