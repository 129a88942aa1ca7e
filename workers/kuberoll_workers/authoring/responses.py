"""Responses of a policy that a contract plays: plausible ones for a row, and nonsense."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kuberoll_workers.dataset.rows import Row

NONSENSE: Mapping[str, str] = {
    "empty": "",
    "white space": " \n\t \n",
    "one character": "x",
    "very long": "all work and no play " * 10_000,
    "one very long word": "9" * 100_000,
    "emoji and accents": "é́🤷🏽‍♀️ ﷽ ñ Ω",
    "right to left": "\u202eاليمين\u202c עברית",
    "other digits": "４２ ٤٢ ४२ ½ ²",
    "control characters": "\x00\x01\x07\x08\x1b[31m\x7f\r\n",
    "special tokens": "<|im_end|><|im_start|>assistant\n</s><|endoftext|><|eot_id|><eos>",
    "thinking without an end": "<think>I am still thinking",
    "open tags": "<answer><call><action>up",
    "closed tags": "</answer></call></action></think>",
    "empty tags": "<answer></answer><call></call><action></action>",
    "an empty box": r"\boxed{} \boxed{\boxed{ }",
    "brackets": "(" * 5_000 + "[" * 5_000 + "{" * 5_000,
    "JSON": '{"answer": null, "n": [1e999, -0]}',
    "broken JSON": '{"answer": "',
    "numbers": "-1 0 1e308 1e-308 NaN Infinity 0x1F 1/0",
    "a huge power": "9**9**9**9 \\boxed{9^{9^{9^9}}}",
    "format fields": "%s %d %n {0} {} ${HOME} {{x}}",
    "code": "```python\nraise SystemExit(1)\n```",
    "an open block of code": "```python\nwhile True: pass",
    "a shell command": "; exit 1 && $(false) `false` | true",
    "a query": "' OR 1=1; DROP TABLE x; --",
    "a regular expression": "(a+)+$ [ ( * ? \\",
    "line separators": "a\u2028b\u2029c\x85d\x0ce",
}
"""Responses that no environment may fail on, by their description."""

_TAGGED = re.compile(r"<(\w+)>[^<>]{0,64}</\1>")
_WORD = re.compile(r"\w+")
_MOST = 16


def plausible(row: Row) -> list[str]:
    """Responses that an environment might expect: what its prompt shows in tags, values of the metadata, some words."""
    prompt = "\n".join(str(message["content"]) for message in row.messages)
    tagged = [match[0] for match in _TAGGED.finditer(prompt)]
    names = list(dict.fromkeys(_TAGGED.findall(prompt)))
    values = [str(value) for value in _scalars(row.metadata)][:4]
    inside = [f"<{name}>{value}</{name}>" for name in names[:3] for value in values[:2]]
    boxed = [rf"The answer is \boxed{{{value}}}." for value in values[:2]]
    words = _WORD.findall(prompt)
    ends = row.stop_strings or ("",)
    plain = [f"{text}{ends[0]}" for text in [*values, "1", "7", "yes", *words[-2:], *words[:1]]]
    return list(dict.fromkeys([*tagged[:6], *inside, *boxed, *plain]))[:_MOST] or ["yes"]


def scripts_of(row: Row, *, count: int, turns: int, seed: int) -> list[tuple[str, ...]]:
    """Sequences of plausible responses to a row, the same for the same seed."""
    known = plausible(row)
    draw = random.Random(f"{seed} {row.where}")
    first = tuple(itertools.islice(itertools.cycle(known), turns))
    return [first, *(tuple(draw.choice(known) for _ in range(turns)) for _ in range(count - 1))]


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _scalars(item)
    elif isinstance(value, list):
        for item in value:
            yield from _scalars(item)
    elif (isinstance(value, str) and len(value) <= 200) or (
        isinstance(value, int | float) and not isinstance(value, bool)
    ):
        yield value
