"""Reading of the choice that a response to a multiple-choice question makes.

Every scan is linear in the length of the response, because a policy writes it and could exploit a slow one: runs of
spaces are bounded and never given back, and only so many statements are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from kuberoll_workers.environments.builtin.responses import (
    HEDGES,
    RETRACTION,
    Span,
    boxes,
    last_line,
    legible,
    tags,
    whole_lines,
)

_GAP = r"\s{1,20}+"
_FINAL = rf"(?:(?:final|correct|right|best|my|overall){_GAP}){{0,4}}"
_MARK = r"[*_`$\\\s]{0,40}+"
_STATEMENT: Final = re.compile(
    rf"(?i)(?<![A-Za-z]){_FINAL}(?:answer|choice|option)(?:{_GAP}(?:choice|option|letter|selected|chosen))?{_MARK}"
    rf"(?:is|would{_GAP}be|should{_GAP}be|must{_GAP}be|:|=)(?:\s{{0,20}}+:)?"
)
_VERDICT: Final = re.compile(
    rf"(?:^|[.!\n]\s{{0,20}}+|\b(?:[Ss]o|[Tt]hus|[Tt]herefore|[Hh]ence),?{_GAP})"
    rf"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer){_GAP})?{_MARK}(?P<label>\(?[A-Z0-9]\)?){_MARK}(?<=\s)is{_GAP}the{_GAP}"
    rf"(?:(?:correct|right|best|most{_GAP}\w{{1,40}}){_GAP})?(?:answer|option|choice)"
)
_RETRACTION: Final = re.compile(RETRACTION)
_HEDGES: Final = re.compile(rf"(?i)^(?:,\s{{0,20}})?(?:{HEDGES}){{1,8}}")
_NOT_BUT: Final = re.compile(r"(?i)^not\b[^.!?\n]{1,80}?\b(?:but|it(?:'s|’s|\sis)|rather|instead)\b[\s,:]{0,8}")
_DENIAL: Final = re.compile(r"(?i)^not\s{1,20}(.*)", re.DOTALL)
# What mentions a choice: a label that stands alone, where A and I are words before another word.
_MENTION: Final = re.compile(r"(?<![A-Za-z0-9'’])(?:[B-HJ-Z0-9]|[AI](?!\s{1,20}[a-z]))(?![A-Za-z0-9'’])")
_SUPPOSED: Final = re.compile(r"(?i)\b(?:if|whether|suppose|assume|assuming|say|that)\s+(?:the\s+)?(?:my\s+)?$")
_WRAPPER: Final = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|sf|it)|boldsymbol|bm)\s*\{([^{}]*)\}")
_PREFIX: Final = re.compile(
    r"(?i)^(?:(?:the\s+)?(?:(?:final|correct|right|best)\s+)?(?:answer|option|choice)\s*(?:is\b)?:?\s*)+"
)
_OPEN, _CLOSE = "([{<", ")]}>"
# After these a label that is also a word (A, I) is meant as a label.
_AFTER_LABEL: Final = re.compile(r"(?i)^(?:is|because|since|as|due|which|where|\(|[-–—])(?![A-Za-z])")
_SEPARATOR: Final = re.compile(r"(?i)^\s*(?:[/|&,;+]|or\b|and\b)\s*(?:and\s+|or\s+)?")
_BETWEEN: Final = re.compile(r"(?i)[\s$.]*(?:[/|&,;+]|or\b|and\b)(?:\s*(?:and|or)\b)?[\s$]*")
_WORDS = "AI"
_MOST_STATEMENTS = 50
_MOST_REPETITIONS = 100
_MOST_WRAPPERS = 8


class Ambiguous(ValueError):
    """A statement names several choices, or one in a way that cannot be read."""


def read_choice(
    text: str, options: Mapping[str, str], *, characters: int = 4000, truncated: bool = False
) -> str | None:
    """The choice of a response: the last one that it states.

    Statements are, by their position: `\\boxed{…}`, `<answer>…</answer>`, and sentences such as `Answer: C`,
    `the correct option is (C)` or `C is the correct answer`. Without any, the last line counts if it is nothing but a
    label or the text of a choice. `The answer is not B` takes back that it is B. Any
    other statement that mentions a choice and cannot be read hides the ones before it; one that mentions none (`the
    answer is easy to see`) does not count.

    Args:
        options: The text of each choice by its label, one capital letter or digit; empty texts if they are unknown.
        text: What the response says after its thoughts.
        characters: Number of characters at the end of the text that are read.
        truncated: The response was cut off: its last line counts only up to its last box or tag.

    Returns:
        The label; None if no choice is stated, or the last statement names several.
    """
    answer = text[-characters:]
    if truncated:
        closed = max((span.end for span in (*boxes(answer), *tags(answer))), default=0)
        answer = answer[: max(closed, len(whole_lines(answer)))]
    answer = legible(answer)
    options = {label: legible(option) for label, option in options.items()}
    try:
        denied: set[str] = set()
        for payload in _statements(answer):
            if (label := _label(payload, options)) is not None:
                return None if label in denied else label
            if (not_it := _denied(payload, options)) is not None:
                denied.add(not_it)
            elif _mentions(payload, options):
                return None
        return None if truncated else _label(last_line(answer), options, alone=True)
    except Ambiguous:
        return None


def _denied(payload: str, options: Mapping[str, str]) -> str | None:
    """The label of which a statement says that it is not the answer."""
    denial = _DENIAL.match(_HEDGES.sub("", _plain(payload)))
    return None if denial is None else _label(denial[1], options)


def _mentions(payload: str, options: Mapping[str, str]) -> bool:
    """True if the first sentence of a statement mentions a label, or the text of a choice."""
    sentence = re.split(r"[.!?](?:\s|$)", _plain(payload), maxsplit=1)[0]
    if any(found[0] in options for found in _MENTION.finditer(sentence)):
        return True
    words = f" {_words(sentence)} "
    return any(len(option) > 1 and f" {_words(option)} " in words for option in options.values())


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", _normal(text)))


def _statements(text: str) -> Iterator[str]:
    """The last statements of a text, backwards; listed boxes or tags (`\\boxed{A} or \\boxed{B}`) are one."""
    listed: list[list[Span]] = []
    before = -1
    for span in sorted([*boxes(text), *tags(text)]):
        if listed and _BETWEEN.fullmatch(text, before, span.start):
            listed[-1].append(span)
        else:
            listed.append([span])
        before = span.end
    found: list[tuple[int, list[Span] | int | str]] = [(spans[-1].start, spans) for spans in listed]
    found += [
        (match.start(), match.end())
        for match in _STATEMENT.finditer(text)
        if not _SUPPOSED.search(text[max(0, match.start() - 40) : match.start()])
    ]
    found += [(match.start("label"), match["label"]) for match in _VERDICT.finditer(text)]
    # `Wait, it is D`; `wait, it is easy to see` says nothing.
    found += [
        (match.start(), match.end())
        for match in _RETRACTION.finditer(text)
        if _MENTION.match(_unhedged(_plain(text[match.end() : match.end() + 80])).lstrip(_OPEN))
    ]
    for _, place in sorted(found, key=lambda item: item[0])[: -_MOST_STATEMENTS - 1 : -1]:
        if isinstance(place, str):
            yield place
        elif isinstance(place, int):
            yield _rest_of_line(text, place)
        else:
            yield " or ".join(span.of(text) for span in place)


def _rest_of_line(text: str, at: int) -> str:
    line, _, following = text[at:].partition("\n")
    if _plain(line):
        return line
    # `The correct answer is:` and the choice on the next line.
    return following.lstrip().partition("\n")[0]


def _plain(text: str) -> str:
    """The text without markup of LaTeX and Markdown."""
    for _ in range(_MOST_WRAPPERS):
        before, text = text, _WRAPPER.sub(r"\1", text)
        if before == text:
            break
    return re.sub(r"[*_`$\"“”]|\\[()\[\]]", "", text).strip()


def _unhedged(text: str) -> str:
    """The text without `clearly` and the like, and without what it says the answer is not, at its beginning."""
    text = _HEDGES.sub("", text)
    return _HEDGES.sub("", _NOT_BUT.sub("", text))


def _normal(text: str) -> str:
    return " ".join(_plain(text).lower().split()).rstrip(".")


def _label(payload: str, options: Mapping[str, str], *, alone: bool = False) -> str | None:
    """The label that a statement names; None if it names none.

    Args:
        alone: The statement must have nothing else than a label or the text of a choice.

    Raises:
        Ambiguous: It names several.
    """
    text = _plain(payload)
    # What is asked for is a label; a choice's text may look like the label of another one.
    bare = text.strip(_OPEN + _CLOSE + ".,;: ")
    if bare.upper() in options:
        return bare.upper()
    # A text that is one of the choices may begin like a statement, or with a label.
    if (exact := _by_text(text, options) or _by_text(bare, options)) is not None:
        return exact
    text = _unhedged(_plain(_PREFIX.sub("", text))) if not alone else text
    if (exact := _by_text(text, options)) is not None:
        return exact
    found = _leading(text, options)
    if found is None:
        return None
    label, closed, rest = found
    rest = _after_list(label, rest, options)
    tail = rest.strip()
    if not tail.strip(".,;:!)]} "):
        return label
    if tail.startswith("?"):
        return None
    described = tail.lstrip(":.)-–— ]")
    if (other := _by_text(described, options)) is not None:
        # `B: Paris` where Paris is choice C contradicts itself.
        return label if other == label else None
    if alone:
        return None
    delimited = closed or tail[0] in ":.)],;!" or rest[:1] in "\n"
    own = options.get(label, "")
    if own and _normal(described).startswith(_normal(own)):
        return label
    if delimited or _AFTER_LABEL.match(tail):
        return label
    capital = text.lstrip(_OPEN)[:1].isupper() or label.isdigit()
    return label if capital and label not in _WORDS and rest[:1].isspace() else None


def _leading(text: str, options: Mapping[str, str]) -> tuple[str, bool, str] | None:
    """The label at the beginning of a text, whether it is in brackets, and the rest of the text."""
    inner = text.lstrip(_OPEN + " ")
    opened = len(inner) < len(text)
    if not inner or (label := inner[0].upper()) not in options:
        return None
    rest = inner[1:]
    if rest[:1].isalnum() or rest[:1] == "'":
        return None
    closed = rest.lstrip()[:1] in tuple(_CLOSE) and opened
    if closed:
        rest = rest.lstrip()[1:]
    if inner[0].islower() and not closed and rest.strip(".,;:!)]} ") and rest[:1] not in tuple(":.)"):
        # A small letter may be a word.
        return None
    return label, closed, rest


def _after_list(label: str, rest: str, options: Mapping[str, str]) -> str:
    """The rest after repetitions of the label.

    Raises:
        Ambiguous: Other labels follow, or too many repetitions to read them all.
    """
    repetitions = 0
    while separator := _SEPARATOR.match(rest):
        repetitions += 1
        if repetitions > _MOST_REPETITIONS:
            raise Ambiguous
        found = _leading(rest[separator.end() :], options)
        if found is None:
            break
        if found[0] != label and (found[2][:1] in ("", " ", ".", ",", "/", ";", ")", "|", "&", "\n")):
            raise Ambiguous
        rest = found[2]
    return rest


def _by_text(text: str, options: Mapping[str, str]) -> str | None:
    wanted = _normal(text)
    found = [label for label, option in options.items() if option and _normal(option) == wanted]
    return found[0] if wanted and len(found) == 1 else None
