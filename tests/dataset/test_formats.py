"""One dataset is the same in every file format: its prompts, tools and metadata."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_api.model.dataset import PromptTemplate
from kuberoll_workers.dataset.rows import Row, parse_row
from kuberoll_workers.dataset.sources import file_rows
from tests.examples import examples

TEMPLATE = PromptTemplate(user="{question} ({points})")


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    columns = dict.fromkeys(key for row in rows for key in row)
    pyarrow.parquet.write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in columns}), file)
    return file.getvalue()


def hugging_face(rows: list[dict[str, Any]]) -> bytes:
    import datasets

    file = io.BytesIO()
    datasets.Dataset.from_list(rows).to_parquet(file)
    return file.getvalue()


def read(data: bytes, template: PromptTemplate | None = None) -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "rows").write_bytes(data)
        return [
            parse_row(row, place=place, task_names=("env",), template=template)
            for place, row in file_rows("rows", Path(directory))
        ]


def shaped(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these fields, in this order; a field that is there may be null."""
    return st.fixed_dictionaries({}, optional={name: st.none() | part for name, part in parts.items()}).map(
        lambda made: {name: made[name] for name in parts if name in made}
    )


NUMBER = st.integers(-9, 9) | st.sampled_from([0.5, 1.0, -2.0])
TEXT = st.sampled_from(["", "null", "None", "1.0", "é"])
LEAF = shaped(type=TEXT, default=NUMBER, enum=st.lists(st.none() | TEXT, max_size=3), minimum=NUMBER, const=TEXT)
PARAMETERS = shaped(type=TEXT, properties=shaped(a=LEAF, b=LEAF, c=shaped(items=LEAF)), required=st.lists(TEXT))
TOOL = st.builds(
    lambda function, more: {"type": "function", "function": {"name": "f", **function}, **more},
    shaped(description=TEXT, parameters=PARAMETERS, strict=st.booleans()),
    shaped(note=TEXT),
)
CALL = st.builds(
    lambda arguments: {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}},
    shaped(a=NUMBER, b=TEXT, c=shaped(d=TEXT)),
)
ASKED = st.builds(lambda text: {"role": "user", "content": text}, TEXT)
CALLED = st.builds(
    lambda call, more: {"role": "assistant", "content": "", **more, "tool_calls": [call]},
    CALL, shaped(name=TEXT, extra=shaped(a=NUMBER)),
)  # fmt: skip
ROW = st.builds(
    lambda messages, more: {"messages": messages, **more},
    st.tuples(ASKED, CALLED, ASKED).map(list),
    shaped(
        tools=st.lists(TOOL, min_size=1, max_size=1),
        metadata=shaped(a=NUMBER, b=TEXT, c=shaped(d=NUMBER, e=st.lists(st.none() | NUMBER))),
        idx=st.integers(0, 9),
    ),
)
_LEAF = {"type": "t", "default": 0.5, "enum": ["e"], "minimum": 1, "const": "c"}
_FUNCTION = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "t", "properties": {"a": _LEAF, "b": _LEAF, "c": {"items": _LEAF}}, "required": ["a"]},
    "strict": True,
}
# With all fields, because a table has no type for an object that is empty in all rows.
FULL = {
    "messages": [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "",
            "name": "n",
            "extra": {"a": 1},
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"a": 1, "b": "b", "c": {"d": "d"}}},
                }
            ],
        },
        {"role": "user", "content": "!"},
    ],
    "tools": [{"type": "function", "function": _FUNCTION, "note": "n"}],
    "metadata": {"a": 1, "b": "b", "c": {"d": 1, "e": [1]}},
    "idx": 1,
}
TEMPLATED = st.builds(
    lambda question, points, more: {"question": question, "points": points, **more}, TEXT, NUMBER, shaped(hint=TEXT)
)


def facts(row: Row) -> Any:
    return row.messages, row.tools, row.metadata, row.idx, row.content


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(ROW, min_size=1, max_size=5))
def test_chats_tools_and_metadata_are_the_same_from_json_and_from_tables(rows: list[dict[str, Any]]) -> None:
    given, other = read(jsonl([FULL, *rows])), read(parquet([FULL, *rows]))
    assert list(map(facts, given)) == list(map(facts, other))


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(TEMPLATED, min_size=1, max_size=5))
def test_filled_templates_are_the_same_from_json_and_from_tables(rows: list[dict[str, Any]]) -> None:
    assert list(map(facts, read(jsonl(rows), TEMPLATE))) == list(map(facts, read(parquet(rows), TEMPLATE)))


@pytest.mark.parametrize("write", [parquet, hugging_face])
def test_a_prompt_is_the_same_to_the_letter(write: Any) -> None:
    """Where the first row has all fields: a table has one order of fields for all rows."""
    whole = {"type": "object", "properties": {"a": {"type": "integer", "default": 1.5}, "b": {"type": "string"}}}
    part = {"type": "object", "properties": {"a": {"type": "integer", "default": None}}}
    rows = [
        {"messages": [{"role": "user", "content": "?"}], "tools": [{"type": "function", "function": function}]}
        for function in ({"name": "f", "parameters": whole}, {"name": "g", "parameters": part})
    ]
    given, other = read(jsonl(rows)), read(write(rows))
    assert [json.dumps(row.tools) for row in given] == [json.dumps(row.tools) for row in other]
    assert "null" not in json.dumps([row.tools for row in given])
