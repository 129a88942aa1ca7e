"""String match: one response that must equal a text, match a regular expression, or be JSON of a schema."""

from __future__ import annotations

import functools
import json
import unicodedata
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.json_schema import is_json_of
from kuberoll_workers.environments.builtin.responses import last_block, last_boxed, last_tagged, legible
from kuberoll_workers.environments.builtin.trials import given_solutions
from kuberoll_workers.environments.builtin.turn import GradedEnvironment, Reply, Turn, grade
from kuberoll_workers.environments.interface import Episode, Metadata, ScoringCase, UnusableRow

MATCH_SECONDS = 1.0
"""Time limit of a regular expression; a response that needs more does not match."""

_KEYS = {
    "exact": ("ground_truth", "expected_answer", "answer"),
    "regex": ("pattern",),
    "jsonSchema": ("schema", "schema_str"),
}


_FRAMES: Mapping[str, str] = {
    "tag": "<answer>{}</answer>",
    "boxed": r"\boxed{{{}}}",
    "codeBlock": "```\n{}\n```",
}
_MOST_ACCEPTED = 3

# For each mode: a row's metadata, right responses, and wrong ones.
_CASES: Mapping[str, tuple[Mapping[str, Any], list[str], list[str]]] = {
    "exact": ({"ground_truth": ["Rome", "Roma"]}, ["Rome", "  Roma\n"], ["Paris", "Rome, Italy", "Rom", ""]),
    "regex": ({"pattern": r"[0-9]+ km"}, ["12 km", " 7 km "], ["12 m", "about 12 km", "12 km or 13 km", ""]),
    "jsonSchema": (
        {"schema": {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}},
        ['{"n": 1}', ' {"n": -2, "m": null} '],
        ['{"n": "1"}', '{"m": 1}', "[1]", '{"n": 1} {"n": 2}', "1", ""],
    ),
}


class StringMatchConfig(EnvironmentConfig):
    """The comparison, and the part of the response that is compared."""

    mode: Literal["exact", "regex", "jsonSchema"] = Field(
        default="exact", description="Comparison with the row: its text, its regular expression, or its JSON schema."
    )
    part: Literal["response", "lastLine", "tag", "boxed", "codeBlock"] = Field(
        default="response",
        description="Compared part: the whole response, its last line, the last <answer> tag, box or block of code.",
    )
    case_sensitive: bool = Field(default=True, description="Whether capital and small letters differ.")


class StringMatchEnvironment(GradedEnvironment):
    """Single turn: the reward is 1 if a part of the response is what the row wants; the episode ends.

    `exact`: `metadata.ground_truth`, `expected_answer` or `answer`, a text or a list of accepted ones. `regex`:
    `metadata.pattern`, which must match all of the part. `jsonSchema`: `metadata.schema` (an object) or `schema_str`
    (its text). Spaces and line breaks around the part and the text do not count, nor do thoughts before `</think>`.
    """

    row_metadata: ClassVar[Mapping[str, str]] = {
        "ground_truth": "or expected_answer, answer: with mode exact, the text or a list of accepted ones",
        "pattern": "with mode regex, the regular expression",
        "schema": "or schema_str: with mode jsonSchema, the schema",
    }

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid; the message names the key.
        """
        self._config = parse_config(StringMatchConfig, config)

    def scoring_cases(self) -> list[ScoringCase]:
        """Cases of this mode, with the compared part as the config wants it."""
        text = _FRAMES.get(self._config.part, "{}")
        metadata, right, wrong = _CASES[self._config.mode]
        return [
            ScoringCase(row={"metadata": metadata}, responses=[text.format(response)], reward=reward)
            for responses, reward in ((right, 1.0), (wrong, 0.0))
            for response in responses
        ]

    def check_row(self, metadata: Metadata) -> None:
        """See `EnvironmentInterface.check_row`."""
        self._matches("", metadata or {})

    def turn(self, reply: Reply, state: dict[str, Any]) -> Turn:
        """See `TurnEnvironment.turn`."""
        # A response that was cut off has not come to its end; what it has closed is complete.
        unclosed = self._config.part in ("response", "lastLine")
        part = None if unclosed and reply.truncated else self._part(reply)
        correct = self._matches(part or "", state) and part is not None
        return grade(correct, state, part)

    def solution(self, episode: Episode) -> dict[str, list[str]] | None:
        """The accepted text, or the row's solution, as the compared part of a response."""
        state = episode.metadata or {}
        texts = given_solutions(state)
        if self._config.mode == "exact":
            key = next((key for key in _KEYS["exact"] if state.get(key) is not None), None)
            texts = _texts(state[key], key)[:_MOST_ACCEPTED] if key is not None else []
        found = {f"the accepted text {number}": [self._framed(text)] for number, text in enumerate(texts, start=1)}
        return found or None

    def attacks(self, episode: Episode) -> dict[str, list[str]]:
        """The accepted texts together, and with more around them."""
        solutions = self.solution(episode) or {}
        if not solutions:
            return {}
        [right, *_] = solutions.values()
        return {
            "something else": [self._framed("987654321 zyxwv")],
            **({"right, and more": [f"{right[0]}, or 987654321 zyxwv"]} if self._config.part == "response" else {}),
        }

    def _framed(self, text: str) -> str:
        """A response whose compared part is this text."""
        return _FRAMES.get(self._config.part, "{}").format(text)

    def _part(self, text: str) -> str | None:
        """The compared part of a response; None if it has none."""
        text = text.strip()
        if self._config.part == "lastLine":
            return text.rpartition("\n")[2].strip()
        if self._config.part == "tag":
            found = last_tagged(text)
        elif self._config.part == "boxed":
            found = last_boxed(text)
        elif self._config.part == "codeBlock":
            found = last_block(text)
        else:
            return text
        return None if found is None else found.strip()

    def _matches(self, part: str, state: Mapping[str, Any]) -> bool:
        mode = self._config.mode
        key = next((key for key in _KEYS[mode] if state.get(key) is not None), None)
        if key is None:
            raise UnusableRow(f"metadata.{_KEYS[mode][0]}: found None; mode {mode} compares the response with it")
        wanted = state[key]
        if mode == "exact":
            return _normal(part, self._config.case_sensitive) in {
                _normal(text, self._config.case_sensitive) for text in _texts(wanted, key)
            }
        if mode == "regex":
            return _matches_pattern(wanted, part, key, case_sensitive=self._config.case_sensitive)
        return _is_json_of(wanted, part, key)


def _normal(text: str, case_sensitive: bool) -> str:
    composed = unicodedata.normalize("NFC", legible(text)).strip()
    return composed if case_sensitive else composed.casefold()


def _texts(wanted: Any, key: str) -> list[str]:
    texts = [wanted] if isinstance(wanted, str) else wanted
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(text, str) and legible(text).strip() for text in texts)
    ):
        raise UnusableRow(f"metadata.{key}: found {str(wanted)[:80]!r}; it must be a text, or a list of accepted ones")
    return texts


def _matches_pattern(pattern: Any, text: str, key: str, *, case_sensitive: bool) -> bool:
    try:
        compiled = _compiled(pattern, case_sensitive)
    except (ValueError, TypeError) as error:
        raise UnusableRow(f"metadata.{key}: {str(pattern)[:80]!r} is not a regular expression: {error}") from error
    try:
        return compiled.fullmatch(text, timeout=MATCH_SECONDS) is not None
    except TimeoutError:
        return False


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str, case_sensitive: bool) -> Any:
    # The standard library's `re` cannot be interrupted.
    import regex

    try:
        return regex.compile(pattern, 0 if case_sensitive else regex.IGNORECASE)
    except regex.error as error:
        raise ValueError(str(error)) from error


def _is_json_of(schema: Any, text: str, key: str) -> bool:
    try:
        written = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
        return is_json_of(written, text, seconds=MATCH_SECONDS)
    except ValueError as error:
        raise UnusableRow(f"metadata.{key}: it is not a JSON schema: {error}") from error
