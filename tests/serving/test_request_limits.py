"""Bounds of requests to vLLM's API: every field of its models, whether this server knows it or not, has one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kuberoll_workers.serving.openai_api.limits import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_NODES,
    MAX_OTHER_CHARACTERS,
    MAX_OTHER_ITEMS,
    Abilities,
    InvalidRequest,
    check_request,
)

ABILITIES = Abilities(renders_tools=True, parses_calls=True)
KNOWN = ["stop", "bad_words", "logit_bias", "metadata", "allowed_token_ids", "messages", "tools", "a_later_field"]


def refuse(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        check_request(json.dumps(fields).encode(), ABILITIES)
    assert refused.value.status == 400
    return refused.value


def check_field(name: str) -> None:
    most = MAX_ITEMS.get(name, MAX_OTHER_ITEMS)
    if most <= 10_000:
        assert refuse(**{name: ["x"] * (100 * most)}).param == name
        refuse(**{name: {str(number): 1 for number in range(100 * most)}})
    refuse(**{name: "x" * (100 * MAX_OTHER_CHARACTERS)})
    refuse(**{name: [{"text": "x" * (100 * MAX_OTHER_CHARACTERS)}]})
    value: Any = "x"
    for _ in range(2 * MAX_DEPTH):
        value = [value]
    refuse(**{name: value})


@pytest.mark.parametrize("name", KNOWN)
def test_a_hundred_times_too_much_of_any_field_is_refused(name: str) -> None:
    check_field(name)


@pytest.mark.slow
def test_every_field_of_vllm_s_requests_has_a_bound() -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    models = (AnthropicMessagesRequest, ChatCompletionRequest, CompletionRequest, ResponsesRequest)
    names = {field for model in models for field in model.model_fields}
    assert {"stop", "logit_bias", "tools"} < names
    for name in sorted(names):
        check_field(name)


def test_many_fields_and_many_values_are_refused() -> None:
    refuse(**{str(number): 1 for number in range(100 * MAX_OTHER_ITEMS)})
    refuse(messages=[{"content": [1] * 1_000}] * (2 * MAX_NODES // 1_000))
    refuse(prompt="x" * (MAX_CHARACTERS + 1))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "#"}}}},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "#"}}}},
        {"structured_outputs": {"json": {"$ref": "#"}}},
        {"structured_outputs": {"grammar": "root ::= root"}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}]},
        {"tools": [{"name": "f", "input_schema": {"$ref": "#"}}]},
    ],
)
def test_forms_that_no_text_has_are_refused(fields: dict[str, Any]) -> None:
    assert "itself" in str(refuse(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": list(range(200_000))},
        {"prompt": [[1] * 50_000, [2] * 50_000]},
        {"messages": [{"role": "user", "content": "x" * 1_000_000}] * 4},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}] * 100}] * 1_000},
        {"stop": "x", "logit_bias": {str(number): 1 for number in range(1_000)}, "metadata": {"a": "b"}},
        {"tools": [{"type": "function", "function": {"name": f"f{n}", "parameters": {}}} for n in range(900)]},
        {"tokens": list(range(100_000))},
    ],
)
def test_large_requests_are_taken(fields: dict[str, Any]) -> None:
    assert check_request(json.dumps(fields).encode(), ABILITIES) == fields
