"""The thoughts of a response: where they end, and so what of it may be an answer, a call or a verdict.

A response is thoughts, if the prompt has opened some or it begins with them, and after them text and calls. The first
closing tag ends the thoughts, and no tag within a later part does. Thoughts that never end are all of the response:
nothing in them is an answer, a call or a verdict.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kuberoll_workers.data.messages import THOUGHTS

if TYPE_CHECKING:
    from kuberoll_workers.data.tokenization import Tokenizer


class Tags(NamedTuple):
    """Texts that open and close thoughts."""

    opening: str
    closing: str


PLAIN: Final = Tags("<think>", "</think>")

# Of families with tokens of their own: Magistral and Ministral, Seed-OSS, Command A, Gemma 4, Apertus, MiniMax.
_FAMILIES: Final = (
    Tags("[THINK]", "[/THINK]"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("<|channel>", "<channel|>"),
    Tags("<|inner_prefix|>", "<|inner_suffix|>"),
    Tags("<mm:think>", "</mm:think>"),
)
# gpt-oss: every message of a response names its channel, and only what is in the final one is said.
_CHANNEL, _MESSAGE, _FINAL = "<|channel|>", "<|message|>", "final"

_CALL: Final = re.compile(r"<tool_call>\s*")
# Tokens at the end of a context among which the beginning of the response is looked for.
_TAIL: Final = 64
# Tokens at the end of a context without any mark: only a tag that ends it opens thoughts.
_END: Final = 8


def thoughts_end(text: str, *, opened: bool | None = None, cut: bool = False, tags: Tags = PLAIN) -> int:
    """Number of characters at the beginning of a response that are thoughts, with their tags.

    Args:
        opened: Whether the prompt has opened thoughts; None: unknown, so a closing tag without an opening one says it.
        cut: Whether the response was cut off at its length limit.

    Returns:
        The length of the text if the thoughts never end, or if it goes on to others that never end.
    """
    start = len(text) - len(text.lstrip())
    if tags.opening not in text and tags.closing not in text:
        within_tag = cut and tags.opening.startswith(text[start:])
        return len(text) if opened or within_tag else 0
    begun = text.startswith(tags.opening, start)
    if opened is None and not begun:
        opened = _closes(text, tags)
    end = 0
    if opened or begun:
        at = text.find(tags.closing)
        if at < 0:
            return len(text)
        end = at + len(tags.closing)
    return len(text) if _begins_again(text, end, cut, tags) else end


def _begins_again(text: str, end: int, cut: bool, tags: Tags) -> bool:
    """True if a response goes on to further thoughts that never end.

    An opening tag in the middle of a line, or in a call, is only mentioned; in what was cut off that is not certain.
    """
    call = _CALL.search(text, end)
    said = text[end : call.start()] if call is not None else text[end:]
    at = said.rfind(tags.opening)
    if at < 0 or said.find(tags.closing, at) >= 0:
        return False
    return cut or not said[:at].rpartition("\n")[2].strip()


def _closes(text: str, tags: Tags) -> bool:
    """True if a text has a closing tag before any opening one, and outside of a call's JSON."""
    at = text.find(tags.closing)
    if at < 0 or tags.opening in text[:at]:
        return False
    begin = 0
    while (call := _CALL.search(text, begin, at)) is not None:
        try:
            _, begin = json.JSONDecoder().raw_decode(text, call.end())
        except (ValueError, RecursionError):
            begin = call.end()
        if begin > at:
            return False
    return True


def unfinished(message: Mapping[str, Any]) -> bool:
    """True if a response's chat message is thoughts that never end."""
    content = message["content"]
    return bool(content) and message.get(THOUGHTS) == len(content) and not content.rstrip().endswith(PLAIN.closing)


def answer_of(message: Mapping[str, Any]) -> str:
    """What a response's chat message says after its thoughts; empty if they never end."""
    content = message.get("content")
    if not isinstance(content, str):
        return ""
    thoughts = message.get(THOUGHTS)
    # Other loops do not say where thoughts end.
    return content[thoughts if isinstance(thoughts, int) else thoughts_end(content) :]


class ThoughtsReader:
    """Finds the thoughts in responses of one model.

    Attributes:
        tags: How the model marks its thoughts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        find = getattr(tokenizer, "added_tokens", None)
        added: Mapping[int, bool] = {} if find is None else find()
        ids = {tokenizer.decode_with_special_tokens([token]): token for token in added}
        self.tags = next((tags for tags in _FAMILIES if tags.opening in ids and tags.closing in ids), PLAIN)
        self._opening, self._closing = (ids.get(tag) for tag in self.tags)
        # Text without special tokens does not show where such thoughts end.
        self._hidden = self._closing is not None and added[self._closing]
        self._channel, self._message = ids.get(_CHANNEL), ids.get(_MESSAGE)
        self._harmony = self._channel is not None and self._message is not None
        # No text around them merges with them, and templates begin a response after one of them.
        self._marks = frozenset(added) - {
            self._opening,
            self._closing,
            *((self._message, self._channel) * self._harmony),
        }
        self._shown = lru_cache(maxsize=256)(self._show)
        self._piece = lru_cache(maxsize=4096)(lambda token: tokenizer.decode_with_special_tokens(array("i", [token])))

    def opened(self, context: Sequence[int], *, before: bool = False) -> bool:
        """True if what the policy reads has opened thoughts that its response goes on with.

        Args:
            context: All token ids that it reads.
            before: Whether the response before has thoughts that never end; they go on where no mark has begun another
                message.
        """
        tail = array("i", context[-_TAIL:])
        at = len(tail) if self._marks else 0
        while at and tail[at - 1] not in self._marks:
            at -= 1
        if not tail or at == len(tail):
            return False
        if self._harmony:
            return self._shown(tail[at:].tobytes()).rpartition(_CHANNEL)[2].startswith("analysis")
        if at:
            shown = self._shown(tail[at:].tobytes())
            return shown.rfind(self.tags.opening) > shown.rfind(self.tags.closing)
        if not before and not self._may_end_a_tag(tail):
            return False
        shown = self._shown(tail[-_END:].tobytes()).rstrip()
        if shown.endswith(self.tags.opening):
            return True
        return before and self.tags.closing not in shown

    def _may_end_a_tag(self, tail: Sequence[int]) -> bool:
        """False if the last letter is not that of an opening tag: a look at a token or two saves to decode them all."""
        for token in reversed(tail):
            if letters := self._piece(token).rstrip():
                return letters[-1] == self.tags.opening[-1]
        return True

    def _show(self, ids: bytes) -> str:
        return self._tokenizer.decode_with_special_tokens(array("i", ids))

    def end(self, ids: Sequence[int], text: str, *, opened: bool, cut: bool) -> int:
        """Number of characters at the beginning of a response's text that are thoughts.

        Args:
            ids: Its token ids.
            text: They, decoded without special tokens.
            opened: See `opened`.
            cut: Whether it was cut off at its length limit.
        """
        if self._harmony:
            return self._end_by_channel(list(ids), text, opened=opened)
        if not self._hidden:
            return thoughts_end(text, opened=opened, cut=cut, tags=self.tags)
        return self._end_by_ids(list(ids), text, opened=opened)

    def end_in_marked(self, text: str, *, opened: bool | None, cut: bool) -> int:
        """As `end`, of a text with special tokens; see `thoughts_end` where it is not known what is opened."""
        if not self._harmony:
            # Special tokens are not mentioned.
            return thoughts_end(text, opened=opened, cut=cut or self._hidden, tags=self.tags)
        said = f"{_CHANNEL}{_FINAL}{_MESSAGE}"
        if said in text:
            return text.index(said) + len(said)
        return len(text) if opened or _CHANNEL in text else 0

    def fields(self, ids: Sequence[int], text: str, *, opened: bool, cut: bool) -> dict[str, int]:
        """Fields of the response's chat message that say where its thoughts end; see `messages.THOUGHTS`."""
        end = self.end(ids, text, opened=opened, cut=cut)
        return {THOUGHTS: end} if end or opened or PLAIN.opening in text or PLAIN.closing in text else {}

    def _end_by_ids(self, ids: list[int], text: str, *, opened: bool) -> int:
        closed = ids.index(self._closing) + 1 if self._closing in ids else 0
        last = max((at for at, token in enumerate(ids) if token in (self._opening, self._closing)), default=None)
        if (last is None and opened) or (last is not None and ids[last] == self._opening):
            return len(text)
        return len(self._tokenizer.decode(ids[:closed]))

    def _end_by_channel(self, ids: list[int], text: str, *, opened: bool) -> int:
        at = 0
        while self._channel in ids[at:]:
            name = ids.index(self._channel, at) + 1
            if self._message not in ids[name:]:
                break
            at = ids.index(self._message, name) + 1
            if self._shown(array("i", ids[name : at - 1]).tobytes()).strip() == _FINAL:
                return len(self._tokenizer.decode(ids[:at]))
        return len(text) if opened or self._channel in ids else 0
