"""Scans of responses: they find what a slow, plain search finds, in one pass over texts that would stall it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.environments.builtin import choices
from kuberoll_workers.environments.builtin.choices import read_choice
from kuberoll_workers.environments.builtin.code.extraction import program_of
from kuberoll_workers.environments.builtin.math.extraction import closing_brace, final_answers
from kuberoll_workers.environments.builtin.responses import boxes, last_block, last_boxed, last_tagged, tags

HOSTILE = 300_000
OPTIONS = {"A": "Paris", "B": "Rome", "C": "The answer"}


def texts(pieces: str) -> st.SearchStrategy[str]:
    """Texts of up to 14 of the pieces, which `|` divides."""
    return st.lists(st.sampled_from(pieces.split("|")), max_size=14).map("".join)


def last(found: list[str]) -> str | None:
    return found[-1] if found else None


def plain_boxes(text: str) -> list[str]:
    found = []
    for box in re.finditer(r"(?=\\boxed *\{)", text):
        opening = text.index("{", box.start())
        end = closing_brace(text, opening)
        if end is not None:
            found.append(text[opening + 1 : end - 1])
    return found


@given(texts(r"\boxed|{|}|\{|\}|\\| |a|\b|boxed{"))
def test_boxes_are_those_of_a_plain_search(text: str) -> None:
    assert [box.of(text) for box in boxes(text)] == plain_boxes(text)
    assert last_boxed(text) == last(plain_boxes(text))


@given(texts("<answer>|</answer>|<ANSWER>|</Answer>|a|\n|<|answer>"))
def test_tags_are_those_of_a_plain_search(text: str) -> None:
    found = re.findall(r"(?is)<answer>((?:(?!</?answer>).)*)</answer>", text)
    assert [tag.of(text) for tag in tags(text)] == found
    assert last_tagged(text) == last(found)


@given(texts("```|\n|```\n|```py|\n```\n| |a|`|    "))
def test_the_last_block_is_that_of_a_plain_search(text: str) -> None:
    found = re.findall(r"(?ms)^```[^\n`]*\n(.*?)^```[ \t]*$", text)
    assert last_block(text) == last(found)


@given(texts("```|\n|```\n|```py|```sh\n|\n```\n| |a|`|    |</think>"))
def test_the_program_is_that_of_a_plain_search(text: str) -> None:
    after = text
    lines = list(re.finditer(r"(?m)^[ \t]{0,3}```[ \t]*([^\s`]*)[^\n`]*$", after))
    found = None if lines or not after.strip() else after
    for index in range(0, len(lines), 2):
        end = lines[index + 1].start() if index + 1 < len(lines) else len(after)
        body = after[lines[index].end() + 1 : end]
        if lines[index][1].lower() in ("", "py", "python", "python3", "py3") and body.strip():
            found = body
    assert program_of(text) == found


@given(
    texts(
        "The |final |correct |answer|option |choice | is|:|=|  |\n|*|A|(B)| should be | is the | would be|So |. |best "
    )
)
def test_statements_are_those_of_a_plain_search(text: str) -> None:
    final, mark = r"(?:(?:final|correct|right|best|my|overall)\s+)*", r"[*_`$\\\s]*"
    statement = re.compile(
        rf"(?i)(?<![A-Za-z]){final}(?:answer|choice|option)(?:\s+(?:choice|option|letter|selected|chosen))?{mark}"
        r"(?:is|would\s+be|should\s+be|must\s+be|:|=)(?:\s*:)?"
    )
    verdict = re.compile(
        r"(?:^|[.!\n]\s*|\b(?:[Ss]o|[Tt]hus|[Tt]herefore|[Hh]ence),?\s+)"
        rf"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s+)?{mark}(?P<label>\(?[A-Z0-9]\)?){mark}\s+is\s+the\s+"
        r"(?:(?:correct|right|best|most\s+\w+)\s+)?(?:answer|option|choice)"
    )
    for plain, used in ((statement, choices._STATEMENT), (verdict, choices._VERDICT)):
        assert [match.span() for match in used.finditer(text)] == [match.span() for match in plain.finditer(text)]


# Before these scans were linear, 28 kB of the first one took seconds, and 4 kB of line breaks minutes.
HOSTILE_PIECES = [
    ("\\boxed{", ""), ("\\boxed{", "}" * 30_000), ("\\boxed{}", ""), ("\\boxed ", "{"), ("\\", "boxed{1}"),
    ("<answer>", ""), ("<answer>", "</answer>"), ("</answer>", ""), ("<", ""),
    ("```\n", "`"), ("```py\n", ""), ("```", "`"), ("``` ", "`"), ("```" + "a" * 99_000 + "\n", "`"),
    ("```" + " " * 99_000, "`"),
    ("\n", ""), (" ", "x"), ("\\text{", "}" * 30_000), ("answer ", ""), ("Answer: ", "A or B"), ("final ", ""),
    ("A or ", "B"), ("Answer: A or ", "B"), ("\\boxed{A} or ", "\\boxed{B}"), ("A is the ", ""), (". ", ""), ("$", ""),
    ("Answer:\n", ""), ("most ", ""), ("So ", ""), ("####", ""), ("1,", "x"), ("if the ", "answer is A"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(HOSTILE_PIECES)))
def test_hostile_texts_come_to_an_end(number: int) -> None:
    piece, end = HOSTILE_PIECES[number]
    text = piece * (HOSTILE // len(piece)) + end
    for read in (last_boxed, last_tagged, last_block, program_of, final_answers):
        read(text)
    # Each of these names no choice, or several.
    assert read_choice(text, OPTIONS, characters=len(text)) is None
