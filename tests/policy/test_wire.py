"""Requests and results survive the wire bit by bit; anything else is refused by name."""

from __future__ import annotations

import json
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from kuberoll_api.model.generation import Sampling
from kuberoll_workers.data.tool_calls import parse_tool_calls
from kuberoll_workers.dataset.rows import DatasetError, RowPosition, parse_row
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.interface import (
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    SamplingParameters,
    StructuredOutputs,
)

media_types = st.sampled_from([wire.MSGPACK, wire.JSON])
token_ids = st.lists(st.integers(min_value=0, max_value=2**31 - 1), min_size=1, max_size=50)
requests = st.builds(
    GenerationRequest,
    request_id=st.text(max_size=20),
    session_id=st.text(max_size=20),
    token_ids=token_ids.map(lambda ids: array("i", ids)),
    sampling=st.builds(
        SamplingParameters,
        max_tokens=st.integers(min_value=0, max_value=10**6),
        temperature=st.floats(min_value=0, max_value=2),
        top_p=st.floats(min_value=0, max_value=1, exclude_min=True),
        top_k=st.integers(min_value=-1, max_value=1000),
        seed=st.none() | st.integers(min_value=0, max_value=2**63 - 1),
        stop=st.lists(st.text(min_size=1, max_size=8), max_size=3).map(tuple),
        stop_token_ids=st.lists(st.integers(min_value=0, max_value=2**31 - 1), max_size=3).map(tuple),
        min_tokens=st.integers(0, 10**6),
        min_p=st.floats(0, 1),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0, 100, exclude_min=True),
        structured_outputs=st.none()
        | st.builds(StructuredOutputs, json=st.just({"type": "object", "required": ["a"]}))
        | st.builds(StructuredOutputs, regex=st.text(max_size=5))
        | st.builds(StructuredOutputs, choice=st.lists(st.text(max_size=5), max_size=3))
        | st.builds(StructuredOutputs, grammar=st.text(max_size=5)),
    ),
)


RESPONSES = ["3", 'So.<tool_call>{"name": "f"}</tool_call>', 'So.<tool_call>{"name": "f"}</tool_call><tool_call>{']


@st.composite
def results(draw: st.DrawFn) -> GenerationResult:
    ids = draw(st.lists(st.integers(min_value=0, max_value=2**31 - 1), max_size=50))
    logprobs = draw(
        st.lists(st.floats(max_value=0, width=32, allow_infinity=False), min_size=len(ids), max_size=len(ids))
    )
    return GenerationResult(
        token_ids=array("i", ids),
        logprobs=array("f", logprobs),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        cached_tokens=draw(st.integers(min_value=0, max_value=10**6)),
        policy_versions=draw(
            st.lists(st.tuples(st.text(max_size=5), st.integers(0, 99), st.integers(0, 99)), max_size=2).map(tuple)
        ),
        tool_calls=draw(st.none() | st.sampled_from(RESPONSES).map(parse_tool_calls)),
    )


@given(requests, media_types)
def test_requests_survive(request: GenerationRequest, media: str) -> None:
    assert wire.decode_request(wire.encode_request(request, media), media) == request


@given(results(), media_types)
def test_results_survive(result: GenerationResult, media: str) -> None:
    assert wire.decode_result(wire.encode_result(result, media), media) == result


@given(st.binary(max_size=200), media_types)
def test_garbage_is_refused(body: bytes, media: str) -> None:
    with pytest.raises(PolicyRefused):
        wire.decode_request(body, media)
    with pytest.raises(wire.WireError):
        wire.decode_result(body, media)


@given(requests, st.data())
def test_torn_bodies_are_refused(request: GenerationRequest, data: st.DataObject) -> None:
    body = wire.encode_request(request)
    cut = data.draw(st.integers(min_value=0, max_value=len(body) - 1))
    with pytest.raises(PolicyRefused):
        wire.decode_request(body[:cut])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": [1, -2]}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids[0]"),
        ({"sampling_params": {}}, "max_tokens"),
        ({"sampling_params": {"max_tokens": -1}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_tokens": 1, "top_p": 2}}, "sampling_params.top_p"),
        ({"sampling_params": {"max_tokens": 1, "topp": 1}}, "unknown field `topp`"),
        ({"prompt": "hi"}, "unknown field `prompt`"),
    ],
)
def test_refusals_name_the_field(change: dict[str, Any], words: str) -> None:
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}, **change}
    with pytest.raises(PolicyRefused) as caught:
        wire.decode_request(json.dumps(body).encode(), wire.JSON)
    assert words in str(caught.value)


def test_packed_ids_of_a_wrong_length_are_refused() -> None:
    body = msgspec.msgpack.encode({"token_ids": b"123", "sampling_params": {"max_tokens": 1}})
    with pytest.raises(PolicyRefused, match="3 bytes"):
        wire.decode_request(body)


@pytest.mark.parametrize(
    ("header", "media"),
    [
        (None, wire.JSON),
        ("application/json; charset=utf-8", wire.JSON),
        ("application/x-msgpack", wire.MSGPACK),
        ("application/x-www-form-urlencoded", wire.JSON),
    ],
)
def test_media_types(header: str | None, media: str) -> None:
    assert wire.media_type(header) == media


def test_unknown_media_types_are_refused() -> None:
    with pytest.raises(wire.WireError, match="text/html"):
        wire.media_type("text/html")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 2**40),
        ("seed", 2**63),
        ("seed", -1),
        ("max_tokens", -1),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
    ],
)
def test_sampling_parameters_that_would_harm_an_engine_are_refused(name: str, value: object) -> None:
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1, name: value}}
    with pytest.raises(PolicyRefused, match=name):
        wire.decode_request(msgspec.msgpack.encode(body))


def test_settings_at_their_defaults_are_not_sent() -> None:
    # So a replica of an older version, which knows fewer of them, refuses only what it cannot honor.
    request = GenerationRequest(
        request_id="r", session_id="s", token_ids=array("i", [1]), sampling=SamplingParameters(max_tokens=5, top_p=0.5)
    )
    assert json.loads(wire.encode_request(request, wire.JSON))["sampling_params"] == {"max_tokens": 5, "top_p": 0.5}


@pytest.mark.parametrize("form", [{}, {"regex": "a", "choice": ["b"]}, {"regex": 3}, {"yaml": "a"}])
def test_a_response_has_one_form(form: dict[str, Any]) -> None:
    sampling = {"max_tokens": 5, "structured_outputs": form}
    body = json.dumps({"token_ids": [1], "sampling_params": sampling}).encode()
    with pytest.raises(PolicyRefused, match="structured_outputs"):
        wire.decode_request(body, wire.JSON)


PLACE = RowPosition("rows[", 0, "]")
BOUNDED = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
sampling_values = st.floats(-1e7, 1e7) | st.floats(-3, 3) | st.integers(-5, 2 * 10**6)


@given(st.sampled_from(BOUNDED), sampling_values)
def test_manifests_rows_and_requests_have_the_same_bounds_of_sampling(name: str, value: float) -> None:
    def accepted(check: Any) -> bool:
        try:
            check()
        except (ValidationError, msgspec.ValidationError, DatasetError):
            return False
        return True

    row = {"prompt": "x", "sampling": {name: value}}
    assert (
        accepted(lambda: Sampling.model_validate({to_camel(name): value}))
        == accepted(lambda: parse_row(row, place=PLACE, task_names=["a"], template=None))
        == accepted(lambda: msgspec.convert({"max_tokens": 1, name: value}, SamplingParameters))
    )
