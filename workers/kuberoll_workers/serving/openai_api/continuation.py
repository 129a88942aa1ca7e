"""Token-exact continuation of chats: a cache of what was read and sampled, by session."""

from __future__ import annotations

import functools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import msgspec

from kuberoll_workers.data.messages import TOKEN_TYPE
from kuberoll_workers.data.tools import Tool, ToolCall

Continuity = Literal["new", "clean", "realigned", "forked"]
"""How a prompt relates to what was generated before in its session.

`new`: nothing was. `clean`: it begins with the ids that were read and sampled. `realigned`: it is the same chat, but
its text encodes to other ids, which were replaced. `forked`: it is another chat, or an edited one.
"""

_TOKENS: Final = 8 << 20
_SESSION_ENTRIES: Final = 256
_KEPT_TEXTS: Final = 64
# Tokens by which chats without a session are told apart.
_BEGINNING: Final = 64


@dataclass(frozen=True, slots=True)
class Generated:
    """One response with its prompt.

    Attributes:
        rendered: Ids of the prompt as the chat template and the tokenizer gave them.
        ids: Ids that the model read, then those that it sampled.
        read: Number of ids that it read.
        end: Token that ended the response; None if it was cut off.
        demand: The tool that it had to call; empty: any; None: none.
    """

    rendered: array[int]
    ids: array[int]
    read: int
    end: int | None
    demand: str | None = None

    def response(self) -> array[int]:
        """Sampled ids, without the one that ended the response."""
        return self.ids[self.read :] if self.end is None else self.ids[self.read : -1]


class Texts(NamedTuple):
    """Conversions of a model.

    Attributes:
        decode: Text of ids, special tokens included.
        encode: Ids of a text, without added special tokens.
        end: Token that ends a message; None: unknown.
        read: Content of a response, and its calls of tools. Its arguments are the text; the tools that were declared,
            by whose schemas some parsers read arguments; and the one that had to be called, as `Generated.demand`.
    """

    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], array[int]]
    end: int | None
    read: Callable[[str, Sequence[Tool], str | None], tuple[str, list[ToolCall]]]


class Continuation(NamedTuple):
    """The ids that the model reads, and how they were found."""

    ids: array[int]
    continuity: Continuity


class ChatMemory:
    """What was generated in each session, so that the next turn of a chat begins with the sampled ids.

    Clients send a chat back as text, which may encode to other ids than were sampled. The oldest sessions beyond some
    8 million tokens are forgotten, and their chats are encoded like any text.
    """

    def __init__(self, texts: Texts, *, tokens: int = _TOKENS, entries: int = _SESSION_ENTRIES) -> None:
        """Set the limits: tokens of all sessions together, responses of each session."""
        self._texts = texts
        self._sessions: OrderedDict[str, list[Generated]] = OrderedDict()
        # Texts of the last chats: each is compared with several prompts.
        self._text = functools.lru_cache(maxsize=_KEPT_TEXTS)(lambda ids: texts.decode(array(TOKEN_TYPE, ids)))
        self._most_tokens, self._most_entries = tokens, entries
        self.tokens = 0

    @property
    def end_token(self) -> int | None:
        """The model's own token that ends a message; None: unknown."""
        return self._texts.end

    def session_of(self, rendered: array[int]) -> str:
        """A session for a prompt whose caller names none: that of a prompt that begins it, or else a new one."""
        beginnings = [rendered[:end].tobytes().hex() for end in range(min(len(rendered), _BEGINNING), 0, -1)]
        return next((name for name in beginnings if name in self._sessions), beginnings[0] if beginnings else "")

    def remember(self, session: str, generated: Generated) -> None:
        """Store a response."""
        entries = self._sessions.setdefault(session, [])
        self._sessions.move_to_end(session)
        if any(known.ids == generated.ids for known in entries):
            return
        entries.append(generated)
        self.tokens += len(generated.ids)
        if len(entries) > self._most_entries:
            self.tokens -= len(entries.pop(0).ids)
        while self.tokens > self._most_tokens and self._sessions:
            _, dropped = self._sessions.popitem(last=False)
            self.tokens -= sum(len(entry.ids) for entry in dropped)

    def continue_chat(self, session: str, rendered: array[int]) -> Continuation:
        """Find the ids to read for a prompt: those of the longest chat that it continues, then its own."""
        entries = self._sessions.get(session)
        if not entries:
            return Continuation(rendered, "new")
        self._sessions.move_to_end(session)
        text: str | None = None
        for entry in sorted(entries, key=lambda entry: len(entry.ids), reverse=True):
            if rendered[: len(entry.ids)] == entry.ids:
                return Continuation(rendered, "clean")
            if text is None:
                text = self._texts.decode(rendered)
            if (ids := self._realigned(entry, rendered, text)) is not None:
                return Continuation(ids, "realigned")
        again = any(entry.rendered == rendered for entry in entries)
        return Continuation(rendered, "new" if again else "forked")

    def _realigned(self, entry: Generated, rendered: array[int], text: str) -> array[int] | None:
        known = self._text(entry.ids.tobytes())
        if text.startswith(known):
            return entry.ids + self._texts.encode(text[len(known) :])
        # The same message, written otherwise: arguments of calls come back as JSON of the template's own style.
        start = len(entry.rendered)
        end = self._texts.end if entry.end is None else entry.end
        if end is None or len(rendered) <= start or rendered[:start] != entry.rendered:
            return None
        stop = next(_positions(rendered, end, start), None)
        if stop is None:
            return None
        sampled, sent = (self._texts.decode(ids) for ids in (entry.response(), rendered[start:stop]))
        if _meaning(*self._texts.read(sampled, (), entry.demand)) != _meaning(*self._texts.read(sent, (), None)):
            return None
        return entry.ids + rendered[stop + (entry.end is not None) :]


def _meaning(content: str, calls: Sequence[ToolCall]) -> tuple[str, list[Any]]:
    """What is the same for two texts of one message, however its calls are written; ids may be made up."""
    functions = [call["function"] for call in calls]
    return content, [(function["name"], msgspec.json.decode(function["arguments"])) for function in functions]


def _positions(ids: array[int], token: int, start: int) -> Iterator[int]:
    return (position for position in range(start, len(ids)) if ids[position] == token)
