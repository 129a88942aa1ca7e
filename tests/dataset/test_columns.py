"""Datasets that were not made for KubeRoll: columns, templates, and the fields beside them."""

from __future__ import annotations

import contextlib
import copy
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from ruamel.yaml import YAML

from kuberoll_api.model.dataset import COLUMN_TARGETS, Dataset, PromptTemplate
from kuberoll_workers.dataset.columns import ColumnMap, MissingColumn, field_of
from kuberoll_workers.dataset.rows import DatasetError, Row, RowPosition, parse_row
from kuberoll_workers.environments.builtin.math.answers import MathAnswersEnvironment

PLACE = RowPosition("rows.jsonl:", 2)
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "datasets.md"


def parse(row: dict[str, Any], columns: dict[str, str] | None = None, template: str | None = None) -> Row:
    prompt = None if template is None else PromptTemplate(user=template)
    return parse_row(row, place=PLACE, task_names=("a",), template=prompt, columns=ColumnMap(columns or {}))


def refusal(row: dict[str, Any], columns: dict[str, str] | None = None, template: str | None = None) -> str:
    with pytest.raises(DatasetError) as caught:
        parse(row, columns, template)
    return str(caught.value).removeprefix("rows.jsonl:2: ")


GSM8K = {
    "question": "A hen lays 3 eggs a day. How many does she lay in 5 weeks?",
    "answer": "In one week the answer is 3*7=<<3*7=21>>21 eggs.\nIn 5 weeks 21*5=<<21*5=105>>105 eggs.\n#### 105",
}
MATH = {
    "problem": "What is $\\frac{1}{2}+\\frac{1}{4}$?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": "A common denominator gives $\\frac{2}{4}+\\frac{1}{4}=\\boxed{\\frac{3}{4}}$.",
}
MATH_500 = {**MATH, "answer": "\\frac{3}{4}", "subject": "Prealgebra", "unique_id": "test/prealgebra/1.json"}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "What is 2+2? The last line is of the form Answer: $Answer."}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
ORZ = {"0": {"from": "human", "value": "What is 2+2?"}, "1": {"from": "assistant", "ground_truth": {"value": "4"}}}

PUBLIC: dict[str, tuple[dict[str, Any], str, str]] = {
    "GSM8K": (GSM8K, GSM8K["question"], "\\boxed{105}"),
    "MATH": (MATH, MATH["problem"], "\\boxed{0.75}"),
    "MATH-500, DeepScaleR, NuminaMath": (MATH_500, MATH["problem"], "\\boxed{\\frac34}"),
    "DAPO-Math-17k, other sets for verl": (DAPO, DAPO["prompt"][0]["content"], "Answer: 4"),  # type: ignore[index]
    "Open-Reasoner-Zero": (ORZ, "What is 2+2?", "The answer is 4."),
}


def columns_of_the_docs() -> dict[str, dict[str, str]]:
    lines = re.findall(r"^\| (.+?) \| .+ \| `columns: (\{.+?\})` \|$", DOCS.read_text(), re.MULTILINE)
    return {name: YAML(typ="safe").load(text) for name, text in lines}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_sets_are_asked_and_graded_without_a_script(name: str) -> None:
    given_row, question, right = PUBLIC[name]
    columns = columns_of_the_docs()[name]
    Dataset.model_validate({"source": {"uri": "rows.jsonl"}, "columns": columns})
    row = parse(given_row, columns)
    assert [message["content"] for message in row.messages] == [question]
    environment = MathAnswersEnvironment({})
    for reply, reward in ((right, 1.0), ("\\boxed{77}", 0.0)):
        log = [*row.messages, {"role": "assistant", "content": reply}]
        assert environment.step([log], [row.metadata]).rewards == [reward]


def test_the_docs_name_no_other_sets() -> None:
    assert columns_of_the_docs().keys() == PUBLIC.keys()


def test_a_whole_field_is_moved_and_a_value_inside_is_copied() -> None:
    row = parse(GSM8K | {"id": 7}, {"prompt": "question", "metadata.ground_truth": "answer", "task_id": "id"})
    assert (row.metadata, row.task_id, row.idx) == ({"ground_truth": GSM8K["answer"]}, 7, 7)
    row = parse(DAPO, {"metadata.ground_truth": "reward_model.ground_truth"})
    assert row.metadata == {
        **{name: DAPO[name] for name in ("data_source", "ability", "reward_model", "extra_info")},
        "ground_truth": "4",
    }


def test_the_column_is_the_prompt_where_the_row_has_another() -> None:
    row = parse({"problem": "2+2?", "messages": [{"role": "assistant", "content": "4"}]}, {"prompt": "problem"})
    assert [message["content"] for message in row.messages] == ["2+2?"]
    assert row.metadata == {"messages": [{"role": "assistant", "content": "4"}]}


def test_a_column_goes_before_a_field_of_its_name() -> None:
    columns = {"prompt": "q", "metadata.answer": "final", "sampling.maxTokens": "limits.0"}
    row = parse({"q": "x", "final": 1, "answer": 2, "metadata": {"answer": 3, "b": 4}, "limits": [5]}, columns)
    assert row.metadata == {"answer": 1, "b": 4, "limits": [5]}
    assert row.sampling == {"max_tokens": 5}


def test_rows_of_a_template_keep_their_other_fields() -> None:
    row = parse({"question": "2+2", "answer": "4", "idx": 3, "metadata": {"level": 1}}, template="Solve: {question}")
    assert [message["content"] for message in row.messages] == ["Solve: 2+2"]
    assert (row.metadata, row.idx) == ({"question": "2+2", "answer": "4", "level": 1}, 3)


def test_fields_of_a_batch_request_itself_are_no_metadata() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}]}
    row = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": body, "final": 4, "level": 1}
    parsed = parse(row, {"metadata.answer": "final"})
    assert parsed.metadata == {"answer": 4, "level": 1}
    assert parsed.idx == "r-1"


def test_columns_and_template_together() -> None:
    row = parse(GSM8K, {"metadata.ground_truth": "answer"}, "{question} Box it.")
    assert row.messages[0]["content"] == f"{GSM8K['question']} Box it."
    assert row.metadata == {"question": GSM8K["question"], "ground_truth": GSM8K["answer"]}


def test_a_prompt_that_is_moved_out_of_the_way_is_the_template_s() -> None:
    row = parse({"prompt": "2+2"}, {"metadata.prompt": "prompt"}, "Solve: {prompt}")
    assert (row.messages[0]["content"], row.metadata) == ("Solve: 2+2", {"prompt": "2+2"})


def test_plain_rows_have_the_metadata_that_they_say() -> None:
    assert parse({"prompt": "x", "other": 1}).metadata is None


@pytest.mark.parametrize(
    ("row", "columns", "template", "message"),
    [
        ({"prompt": "x"}, {}, "{prompt}", "prompt: the row has a prompt already, and the job has a dataset.prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, {}, "x", "messages: the row has a prompt already"),
        ({"responses_create_params": {"input": "x"}}, {}, "x", "responses_create_params.input: the row has a prompt"),
        (
            {"question": "x"},
            {},
            None,
            "messages and prompt are missing, and the job has no dataset.promptTemplate",
        ),
        ({"q": "x", "a": 1}, {"prompt": "question"}, None, "question: the row has no field 'question'; it has q, a. "),
        ({"questoin": "x"}, {"prompt": "question"}, None, "question: the row has no field 'question'; it has questoin"),
        ({"q": {"a": 1}}, {"prompt": "q.text"}, None, "q.text: q has no field 'text'; it has a"),
        ({"q": ["x"]}, {"prompt": "q.1"}, None, "q.1: q has 1 items, and no item '1'"),
        ({"q": "x"}, {"prompt": "q.0.text"}, None, "q.0.text: q has no fields, because it is a single value"),
        ({"q": None}, {"prompt": "q"}, None, "q: found nothing; dataset.columns maps it to prompt"),
        ({"q": 3}, {"prompt": "q"}, None, "q: found a number 3"),
        ({"q": [{"role": "user"}]}, {"messages": "q"}, None, "q[0].content: found nothing"),
        ({"q": "x", "name": "chess"}, {"prompt": "q", "task_name": "name"}, None, "name: found 'chess'"),
        ({"q": "x", "n": 1.5}, {"prompt": "q", "task_id": "n"}, None, "n: found a number 1.5"),
        ({"q": "x", "t": 9}, {"prompt": "q", "sampling.temperature": "t"}, None, "t: found a number 9"),
        ({"q": "x", "m": 9}, {"prompt": "q", "metadata": "m"}, None, "m: found a number 9; it must be an object"),
        ({"q": "x", "a": 1, "metadata": {"a": 2}}, {"prompt": "q"}, None, "metadata.a: the row also has a different a"),
    ],
)
def test_rows_that_do_not_fit_name_the_dataset_s_field(
    row: dict[str, Any], columns: dict[str, str], template: str | None, message: str
) -> None:
    assert refusal(row, columns, template).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"columns": {"promt": "q"}}, "columns.promt: is not a field that KubeRoll reads"),
        ({"columns": {"prompt.0": "q"}}, "is not a field that KubeRoll reads"),
        ({"columns": {"metadata.": "q"}}, "is not a field that KubeRoll reads"),
        ({"columns": {"metadata": "m", "metadata.a": "q"}}, "excludes metadata, which contains it"),
        ({"columns": {"prompt": "q", "messages": "m"}}, "excludes prompt; a row has one prompt"),
        ({"columns": {"prompt": "q"}, "promptTemplate": {"user": "{q}"}}, "excludes columns.prompt: both make"),
    ],
)
def test_columns_that_contradict(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Dataset.model_validate({"source": {"uri": "rows.jsonl"}, **fields})
    (error,) = caught.value.errors()
    assert message in f"{'.'.join(map(str, error['ctx']['path']))}: {error['msg']}"


NAMES = st.sampled_from(["a", "b", "a.b", "0", "prompt", "messages", "metadata", "idx", "body", "custom_id"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "x", "y"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
ROWS = st.dictionaries(NAMES, VALUES, max_size=5)
PATHS = st.lists(st.sampled_from(["a", "b", "0", "-1", "prompt", "metadata", ""]), min_size=1, max_size=3).map(".".join)
TARGETS = st.sampled_from([*COLUMN_TARGETS, "metadata.a", "metadata.a.b", "sampling.temperature", "sampling.seed"])


@given(ROWS, st.dictionaries(TARGETS, PATHS, max_size=3), st.sampled_from([None, "{a}", "{prompt}"]))
def test_any_row_is_read_or_refused_and_never_changed(
    row: dict[str, Any], columns: dict[str, str], template: str | None
) -> None:
    before = copy.deepcopy(row)
    with contextlib.suppress(DatasetError):
        parsed = parse(row, columns, template)
        # Only a row that says so has none: its environment's `reset` adds the prompt.
        assert parsed.messages or columns or [] in (row.get("prompt"), row.get("messages"))
        for target, name in columns.items():
            if target.startswith("metadata.a") and "metadata" not in columns and len(columns) == 1:
                assert parsed.metadata is not None
                assert field_of({"metadata": parsed.metadata}, target, "") == field_of(row, name, "")
    assert row == before


@given(ROWS, PATHS)
def test_a_field_is_found_by_its_path_or_its_absence_is_explained(row: dict[str, Any], path: str) -> None:
    try:
        value = field_of(row, path, "prompt")
    except MissingColumn as error:
        why = str(error)
    else:
        why = ""
        assert ColumnMap({"prompt": path}).mapped(row)["prompt"] == value
    assert not why or (why.startswith(f"{path}: ") and path not in row)
