"""What a text states as the answer to something: "the expected answer is 42"."""

from __future__ import annotations

import re
from typing import Final

_STATED: Final = re.compile(
    r"(?i)\b(?:(?:final|correct|right|expected|true|reference)\s+)?(?:answer|solution|result|output"
    r"|ground[ _]truth|key|reference)\b\s*(?:is|are|equals|:|=)\s*:?\s*(?P<answer>[^\n]{1,200})"
)


def stated_answers(text: str) -> list[str]:
    """The answers that a text states, in their order, without the words and the closing marks around them."""
    found = [match["answer"].strip() for match in _STATED.finditer(text)]
    # Instructions about the form are not an answer.
    return [one.rstrip(".)]} ") for one in found if one.strip("\\boxed{}<>.\"'` ")]
