"""Responses that are, or are not, what a row wants word for word."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.environments import UnusableRow
from kuberoll_workers.environments.builtin.string_match import StringMatchEnvironment

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


def reward(config: dict[str, Any], metadata: dict[str, Any], reply: str) -> float:
    log = [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}]
    returned = StringMatchEnvironment(config).step([log], [metadata])
    assert returned.terminateds == [True]
    found: float = returned.rewards[0]
    return found


@pytest.mark.parametrize(
    ("config", "metadata", "right", "wrong"),
    [
        ({}, {"ground_truth": "Paris"}, ["Paris", " Paris\n", "<think>Rome</think>Paris"],
         ["paris", "Paris.", "It is Paris", "", "<think>Paris", "<think>Paris</think>"]),
        ({"caseSensitive": False}, {"expected_answer": ["Paris", "STRASSE"]}, ["PARIS", "stra\u00dfe"], ["Rome"]),
        ({}, {"answer": "caf\u00e9"}, ["cafe\u0301"], ["cafe"]),
        ({}, {"answer": "Ward 12"}, ["\ufeffWard\u3000\uff11\uff12\u200b", "\u2066Ward 12\u2069"], ["Ward", "\u200b"]),
        ({"part": "lastLine"}, {"answer": "42"}, ["I think\n42", "42"], ["42\nI think", "42 I think"]),
        ({"part": "tag"}, {"answer": "42"}, ["<answer>42</answer>", "<answer>1</answer> no <answer> 42 </answer>."],
         ["42", "<answer>42", "<answer>42</answer><answer>1</answer>"]),
        ({"part": "boxed"}, {"answer": "x^{2}"}, ["so \\boxed{x^{2}}"], ["x^{2}", "\\boxed{x^{2}", "\\boxed{x^2}"]),
        ({"part": "codeBlock"}, {"answer": "print(1)"}, ["Here:\n```python\nprint(1)\n```\nDone."],
         ["print(1)", "```python\nprint(1)", "```\nprint(2)\n```"]),
        ({"mode": "regex"}, {"pattern": r"\d{4}-\d{2}"}, ["2024-05"], ["2024-05-01", "on 2024-05", ""]),
        ({"mode": "regex", "caseSensitive": False}, {"pattern": "yes|no"}, ["YES", "No"], ["yes no"]),
        ({"mode": "jsonSchema"}, {"schema": PERSON}, ['{"name": "Ada"}', '{"name": "Ada", "age": 36}'],
         ["", "null", "[]", '{"age": 3}', '{"name": 1}', '{"name": "A", "age": -1}', '{"name": "A", "x": 1}',
          '{"name": "A"} and more', '{"name": NaN}', "{'name': 'A'}", "```json\n{\"name\": \"A\"}\n```"]),
        ({"mode": "jsonSchema", "part": "codeBlock"}, {"schema_str": '{"type": "array"}'},
         ["```json\n[1]\n```"], ["[1]", "```json\n{}\n```"]),
    ],
)  # fmt: skip
def test_known_good_and_known_bad(
    config: dict[str, Any], metadata: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    assert [reply for reply in right if reward(config, metadata, reply) != 1.0] == []
    assert [reply for reply in wrong if reward(config, metadata, reply) != 0.0] == []


def test_an_expression_that_explodes_does_not_match() -> None:
    assert reward({"mode": "regex"}, {"pattern": r"(a|aa|a?)+$b"}, "a" * 64) == 0.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 1) | st.sampled_from([0.0, 1.0, "", "1"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


@given(st.lists(JSON, max_size=4))
def test_unique_items_are_those_of_jsonschema(items: list[Any]) -> None:
    schema = {"uniqueItems": True}
    expected = jsonschema.Draft202012Validator(schema).is_valid(items)
    assert reward({"mode": "jsonSchema"}, {"schema": schema}, json.dumps(items)) == float(expected)


def test_json_that_would_stall_its_schema_is_judged() -> None:
    many = json.dumps([{}, *range(100_000)])
    assert reward({"mode": "jsonSchema"}, {"schema": {"uniqueItems": True}}, many) == 1.0
    slow = {"type": "array", "items": {"pattern": "^(a|aa|a?)+$b"}}
    assert reward({"mode": "jsonSchema"}, {"schema": slow}, json.dumps(["a" * 64] * 100)) == 0.0
    digits = {"schema": {"pattern": "^[0-9]+$"}}
    assert reward({"mode": "jsonSchema"}, digits, '"12"') == 1.0
    assert reward({"mode": "jsonSchema"}, digits, '"1b"') == 0.0
    with pytest.raises(UnusableRow, match=r"metadata.schema: it is not a JSON schema: '\(' is not a 'regex'"):
        reward({"mode": "jsonSchema"}, {"schema": {"pattern": "("}}, '"12"')


@pytest.mark.parametrize(
    ("config", "metadata", "message"),
    [
        ({}, {}, "metadata.ground_truth: found None; mode exact"),
        ({}, {"answer": 7}, "metadata.answer: found '7'"),
        ({}, {"answer": " "}, "metadata.answer: found ' '"),
        ({}, {"answer": []}, "metadata.answer: found"),
        ({"mode": "regex"}, {"pattern": "("}, r"metadata.pattern: '\(' is not a regular expression: missing \)"),
        ({"mode": "regex"}, {"pattern": 7}, "metadata.pattern: '7' is not a regular expression"),
        ({"mode": "jsonSchema"}, {"schema": {"type": "objekt"}}, "metadata.schema: it is not a JSON schema: 'objekt'"),
        ({"mode": "jsonSchema"}, {"schema": [1]}, "metadata.schema: it is not a JSON schema: it must be an object"),
        ({"mode": "jsonSchema"}, {"schema_str": "{"}, "metadata.schema_str: it is not a JSON schema"),
    ],
)
def test_unusable_rows_are_named(config: dict[str, Any], metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableRow, match=message):
        StringMatchEnvironment(config).check_row(metadata)


@given(st.text(), st.sampled_from(["response", "lastLine", "tag", "boxed", "codeBlock"]))
def test_any_response_is_graded(text: str, part: str) -> None:
    assert reward({"part": part}, {"answer": "7"}, text) in (0.0, 1.0)
    assert reward({"part": part, "mode": "jsonSchema"}, {"schema": {"type": "integer"}}, text) in (0.0, 1.0)
