"""Special tokens of chat templates in texts that another model reads."""

from __future__ import annotations

import re
from typing import Final

# Tokens by which chat templates separate roles. In a text they would end the message that it stands in.
_SPECIAL: Final = re.compile(
    r"<(?=[|｜][^<>\n]{0,200}[|｜]>)"
    r"|<(?=/?(?:s|bos|eos|pad|unk|sep|cls|mask|start_of_turn|end_of_turn|im_start|im_end|system|user|assistant)>)"
    r"|<(?=</?SYS>>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\])"
)


def harmless(text: str) -> str:
    """A text in which no special token of a chat template is spelled: a space follows the bracket of each."""
    return _SPECIAL.sub(lambda match: f"{match[0]} ", text)
