"""Every list and text that a caller may send has a bound: fields that are added later are found here."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect as inspect
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.policy import wire
from kuberoll_workers.policy.agent_sessions import SessionSettings
from kuberoll_workers.policy.forms import check_grammar, check_schema
from kuberoll_workers.policy.interface import MAX_STOP, MAX_STOPS, PolicyRefused

REQUEST: dict[str, Any] = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}


def unbounded(kind: inspect.Type, path: str) -> Iterator[str]:
    """Paths of the lists, objects and texts without a maximum length."""
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from unbounded(field.type, f"{path}.{field.encode_name}")
    elif isinstance(kind, inspect.UnionType):
        for option in kind.types:
            yield from unbounded(option, path)
    elif isinstance(kind, inspect.StrType | inspect.BytesType):
        if kind.max_length is None:
            yield path
    elif isinstance(kind, inspect.CollectionType | inspect.DictType):
        if kind.max_length is None:
            yield path
        if isinstance(kind, inspect.CollectionType):
            yield from unbounded(kind.item_type, f"{path}[]")
    elif isinstance(kind, inspect.Metadata):
        yield from unbounded(kind.type, path)
    else:
        assert isinstance(kind, inspect.IntType | inspect.FloatType | inspect.NoneType | inspect.BoolType), (path, kind)


@pytest.mark.parametrize("kind", [wire._Request, SessionSettings])
def test_every_field_of_a_request_has_a_bound(kind: type) -> None:
    assert list(unbounded(inspect.type_info(kind), kind.__name__)) == []


def test_a_field_without_a_bound_is_found() -> None:
    class Late(msgspec.Struct):
        names: dict[str, list[str]] | None = None

    assert list(unbounded(inspect.type_info(Late), "late")) == ["late.names"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop": ["x"] * (100 * MAX_STOPS)},
        {"stop": ["x" * (100 * MAX_STOP)]},
        {"stop_token_ids": list(range(100 * MAX_STOPS))},
        {"structured_outputs": {"choice": ["x"] * 102_400}},
        {"structured_outputs": {"choice": ["x" * 409_600]}},
        {"structured_outputs": {"regex": "x" * 6_553_600}},
        {"structured_outputs": {"grammar": "x" * 6_553_600}},
        {"structured_outputs": {"json": {"enum": ["x"] * 2_000_000}}},
        {"structured_outputs": {"json": {"$ref": "#"}}},
        {"structured_outputs": {"grammar": "root ::= root"}},
    ],
)
def test_a_hundred_times_too_much_is_refused(sampling: dict[str, Any]) -> None:
    body = json.dumps({**REQUEST, "sampling_params": {"max_tokens": 1, **sampling}}).encode()
    with pytest.raises(PolicyRefused):
        wire.decode_request(body, wire.JSON)


def nested(depth: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/"},
        {"anyOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}},
        {"properties": {"x": {"$ref": "#/properties/x"}}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}},
        nested(6_400),
    ],
)
def test_schemas_that_no_value_has_are_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"^here: "):
        check_schema(schema, "here")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}}}},
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        {"$ref": "#nowhere"},
        {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        {"$ref": "#/$defs/none"},
        {"properties": {"$ref": {"type": "string"}}},
        nested(50),
    ],
)
def test_schemas_with_references_are_taken(schema: Any) -> None:
    check_schema(schema, "here")


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["$ref", "anyOf", "$defs", "a", "properties"]), inner, max_size=4)
        ),
        max_leaves=20,
    )
)
def test_any_value_is_taken_or_refused(schema: Any) -> None:
    with contextlib.suppress(ValueError):
        check_schema(schema, "here")


@pytest.mark.parametrize("grammar", ["root ::= root", "root ::= a\na ::= b # c\nb ::= a", "x ::= 'y'\nroot ::= root\n"])
def test_grammars_of_nothing_are_refused(grammar: str) -> None:
    with pytest.raises(ValueError, match="defined only by itself"):
        check_grammar(grammar, "here")


@pytest.mark.parametrize("grammar", ['root ::= "a" root | "b"', "root ::= a\na ::= [a-z]+", "", "no grammar"])
def test_other_grammars_are_the_engine_s(grammar: str) -> None:
    check_grammar(grammar, "here")
