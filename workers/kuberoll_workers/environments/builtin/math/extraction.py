"""Extraction of the final answer from a response to a mathematical question, as text.

Every scan is linear in the length of the response, because a policy writes it and could exploit a slow pattern.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kuberoll_workers.environments.builtin.responses import HEDGES, RETRACTION, last_line, legible, whole_lines

MAX_ANSWER_CHARACTERS = 2000
"""Maximum length of a final answer; longer texts count as no answer."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{")
_MARKER = re.compile(
    r"\b(?:answer|solution|result)\b[\s*_]{0,8}(?:(?:is|are|equals)\b[\s*_]{0,8}:?|:|=)", re.IGNORECASE
)
_RETRACTION = re.compile(RETRACTION + r"(?=[\s*_:]{1,8}(?:[-−+$0-9]|\\[(\[]|\\d?frac\b|\\sqrt\b))")
_HEDGES = re.compile(rf"(?i)^(?:,\s{{0,20}})?(?:{HEDGES}){{1,8}}")
_NOT_BUT = re.compile(r"(?i)^not\b[^.!?\n]{1,80}?\b(?:but|rather|instead)(?:\s+(?:it\s+is|it's|rather))?[\s,:]{1,8}")
_CONNECTOR = re.compile(r"[\s$]*(?:,|;|\band\b|\bor\b|, ?and\b|, ?or\b)[\s$]*(?:[A-Za-z](?:_\w)?\s*=\s*)?")
_MAX_GAP = 40
_MAX_LINE = 400
_CONJUNCTION = re.compile(
    r",?\s(?:because|since|as|so|when|where|which|that|if|for|by|after|before|not|rather|instead)\s", re.IGNORECASE
)
_NUMBER = r"[-+−]?(?:[$€£¥]|\\\$)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?%?"
_LAST_NUMBERS = re.compile(rf"(?<![\w.]){_NUMBER}(?![\w])")
_JOINED = re.compile(r"\s{0,4}(?:,|\bor\b|\band\b|, or|, and)\s{0,4}")
_EMPHASIS = "*_ \t"


@dataclass(frozen=True, slots=True)
class Region:
    """Part of a text between mathematical delimiters: `start` and `end` include them, `content` does not."""

    start: int
    end: int
    content: str


def final_answers(text: str, *, truncated: bool = False) -> list[str]:
    """The answers that a response commits to, in order.

    Boxes take precedence, then the part after `####`, then the part after "answer is" or "answer:", then the end of the
    last line. Boxes joined by "and", "or" or a comma form one list. Several boxes are several answers, all of which
    must be right, so boxing every candidate does not help.

    Args:
        text: What the response says after its thoughts.
        truncated: The response was cut off: its last line is not complete, and only closed boxes are read there.

    Returns:
        Texts without delimiters; empty if the response has no answer.
    """
    text = legible(text)
    if _BOX.search(text):
        return _boxed(text)
    if truncated:
        text = whole_lines(text)
    if (found := _after_marker(text)) is not None:
        return [found] if found else []
    found = "" if truncated else _end_of(last_line(text).strip(_EMPHASIS))
    return [found] if found else []


def _boxed(text: str) -> list[str]:
    # For each answer, the contents of its boxes.
    answers: list[list[str]] = []
    previous_end: int | None = None
    position = 0
    while (opening := _BOX.search(text, position)) is not None:
        end = closing_brace(text, opening.end() - 1)
        if end is None:
            return []  # cut off within the answer
        content = text[opening.end() : end - 1].strip()
        if len(content) > MAX_ANSWER_CHARACTERS:
            return []
        gap = "" if previous_end is None else text[previous_end : opening.start()]
        if answers and len(gap) <= _MAX_GAP and _CONNECTOR.fullmatch(gap):
            answers[-1].append(content)
        else:
            answers.append([content])
        previous_end = position = end
    joined = [", ".join(contents) for contents in answers]
    return joined if all(joined) else []


def closing_brace(text: str, opening: int) -> int | None:
    """Position after the brace that closes the one at `opening`; None if it is never closed."""
    depth = 0
    position = opening
    while position < len(text):
        letter = text[position]
        if letter == "\\":
            position += 2
            continue
        if letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    return None


def regions(text: str) -> list[Region]:
    r"""Parts of a text between `$…$`, `$$…$$`, `\(…\)` and `\[…\]`, in order.

    A `$` opens mathematics only if no space follows, and closes it only if no space precedes and no digit follows, so
    prices are text.
    """
    found: list[Region] = []
    position = 0
    closers = {"\\(": "\\)", "\\[": "\\]", "$$": "$$"}
    # An unsuccessful search is not repeated, which keeps the scan linear.
    exhausted: set[str] = set()
    prices_until = 0
    while position < len(text):
        two = text[position : position + 2]
        closer = closers.get(two)
        if closer is not None and closer not in exhausted:
            end = text.find(closer, position + 2)
            if end >= 0:
                found.append(Region(position, end + 2, text[position + 2 : end].strip()))
                position = end + 2
                continue
            exhausted.add(closer)
        if two[:1] == "\\":
            position += 2
            continue
        if two[:1] == "$" and position >= prices_until and len(two) == 2 and not two[1].isspace() and two[1] != "$":
            line_end = text.find("\n", position)
            line_end = len(text) if line_end < 0 else line_end
            dollar = _closing_dollar(text, position + 1, line_end)
            if dollar is not None:
                found.append(Region(position, dollar + 1, text[position + 1 : dollar].strip()))
                position = dollar + 1
                continue
            prices_until = line_end
        position += 1
    return found


def _closing_dollar(text: str, start: int, stop: int) -> int | None:
    position = start
    while (position := text.find("$", position, stop)) >= 0:
        before, after = text[position - 1], text[position + 1 : position + 2]
        if position > start and before != "\\" and not before.isspace() and not after.isdigit():
            return position
        position += 1
    return None


def _after_marker(text: str) -> str | None:
    """Text after the last `####`, "answer is" or "wait, it is"; None if there is none."""
    hashes = text.rfind("####")
    if hashes >= 0:
        return _first_line(text[hashes + 4 :])
    ends = [marker.end() for marker in _MARKER.finditer(text)]
    if not ends:
        return None
    ends += [retraction.end() for retraction in _RETRACTION.finditer(text, ends[-1])]
    tail = _HEDGES.sub("", _first_line(text[ends[-1] :])[: 2 * MAX_ANSWER_CHARACTERS])
    return _end_of_sentence(_HEDGES.sub("", _NOT_BUT.sub("", tail)))


def _end_of_sentence(tail: str) -> str:
    joined = _joined_regions(tail)
    if joined is not None:
        return joined
    conjunction = _CONJUNCTION.search(tail)
    if conjunction is not None:
        tail = tail[: conjunction.start()]
    stop = re.search(r"[.!?](?:\s|$)", tail)
    return _capped(tail[: stop.start()] if stop else tail)


def _joined_regions(text: str) -> str | None:
    """The first region of a text, with those that a comma, "and" or "or" joins to it; None if it has no region."""
    found = regions(text)
    if not found:
        return None
    parts, end = [found[0].content], found[0].end
    for region in found[1:]:
        gap = text[end : region.start]
        if len(gap) > _MAX_GAP or not _CONNECTOR.fullmatch(gap):
            break
        parts.append(region.content)
        end = region.end
    return _capped(", ".join(parts))


def _first_line(text: str) -> str:
    for line in text.splitlines():
        if line.strip(_EMPHASIS):
            return line.strip(_EMPHASIS)
    return ""


def _end_of(line: str) -> str:
    """Value at the end of a line without any marker."""
    line = line[-_MAX_LINE:]
    found = regions(line)
    if found:
        first = len(found) - 1
        while first > 0:
            gap = line[found[first - 1].end : found[first].start]
            if len(gap) > _MAX_GAP or not _CONNECTOR.fullmatch(gap):
                break
            first -= 1
        return _capped(", ".join(region.content for region in found[first:]))
    worded = re.search("[A-Za-z]{2,}", line) is not None
    if not worded or (len(line) <= _MAX_GAP and not re.search("[0-9=]", line)):
        return _capped(line.rpartition("=")[2] if "=" in line and not re.search("[<>]", line) else line)
    _, equals, after = line.rpartition("=")
    if equals and re.fullmatch(r"[^A-Za-z]{1,200}\.?", after.strip()):
        return _capped(after)
    return _last_numbers(line)


def _last_numbers(line: str) -> str:
    """The last number of a line, with the numbers that a comma, "and" or "or" joins to it."""
    numbers = list(_LAST_NUMBERS.finditer(line))
    if not numbers:
        return _capped(line)
    first = len(numbers) - 1
    while first > 0 and _JOINED.fullmatch(line, numbers[first - 1].end(), numbers[first].start()):
        first -= 1
    return _capped(line[numbers[first].start() : numbers[-1].end()].rstrip(",."))


def _capped(text: str) -> str:
    text = text.strip().strip("*").strip()
    return "" if len(text) > MAX_ANSWER_CHARACTERS else text
