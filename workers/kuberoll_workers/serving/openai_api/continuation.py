"""Token-exact continuation of chats: a cache of what was read and sampled, by session."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import msgspec

from kuberoll_workers.data.tools import ToolCall
from kuberoll_workers.serving.openai_api.token_chains import Chain, TokenChains, prefix_digests

Continuity = Literal["new", "clean", "realigned", "forked"]
"""How a prompt relates to what was generated before in its session.

`new`: nothing was. `clean`: it begins with the ids that were read and sampled. `realigned`: it is the same chat, but
its text encodes to other ids, which were replaced. `forked`: it is another chat, or an edited one.
"""

_TOKENS: Final = 8 << 20
_SESSION_ENTRIES: Final = 256
# Part of the tokens that one session may have.
_SHARE: Final = 4
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


class Texts(NamedTuple):
    """Conversions of a model.

    Attributes:
        decode: Text of ids, special tokens included.
        encode: Ids of a text, without added special tokens.
        end: Token that ends a message; None: unknown.
        read: Content of a response, and its calls of tools. Its arguments are the text; the tools that were declared,
            by whose schemas some parsers read arguments; the one that had to be called, as `Generated.demand`; whether
            the prompt had opened thoughts (None: unknown); and whether the response was cut off.
        opened: Whether ids that the model reads have opened thoughts that its response goes on with.
    """

    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], array[int]]
    end: int | None
    read: Callable[..., tuple[str, list[ToolCall]]]
    opened: Callable[[Sequence[int]], bool] | None = None


class Continuation(NamedTuple):
    """The ids that the model reads, and how they were found."""

    ids: array[int]
    continuity: Continuity


class _Entry:
    """A response in memory: its ids in a chain, and digests instead of everything that is only compared."""

    __slots__ = ("added", "chain", "demand", "digest", "end", "read", "rendered", "text")

    def __init__(self, generated: Generated, chain: Chain, digest: bytes, added: int) -> None:
        self.chain, self.digest, self.added = chain, digest, added
        self.read, self.end, self.demand = generated.read, generated.end, generated.demand
        self.rendered = (len(generated.rendered), _digest(generated.rendered))
        # Length and digest of the text of all ids; made when they are first needed.
        self.text: tuple[int, bytes] | None = None

    def response(self) -> array[int]:
        """Sampled ids, without the one that ended the response."""
        ids = self.chain.ids(self.read)
        return ids if self.end is None else ids[:-1]


class ChatMemory:
    """What was generated in each session, so that the next turn of a chat begins with the sampled ids.

    Clients send a chat back as text, which may encode to other ids than were sampled. What chats have in common is
    stored once: a chat of many turns takes about as many tokens as its last turn. The oldest sessions beyond some 8
    million tokens, and the oldest responses of a session with more than a quarter of these, are forgotten, and their
    chats are encoded like any text.
    """

    def __init__(self, texts: Texts, *, tokens: int = _TOKENS, entries: int = _SESSION_ENTRIES) -> None:
        """Set the limits: tokens of all sessions together, responses of each session."""
        self._texts = texts
        self._sessions: OrderedDict[str, list[_Entry]] = OrderedDict()
        self._chains = TokenChains()
        self._most_tokens, self._most_entries = tokens, entries

    @property
    def tokens(self) -> int:
        """Number of tokens that are stored."""
        return self._chains.tokens

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
        digest = _digest(generated.ids)
        if any(known.digest == digest for known in entries):
            return
        before = self._chains.tokens
        chain = self._chains.hold(generated.ids)
        entries.append(_Entry(generated, chain, digest, self._chains.tokens - before))
        share = self._most_tokens // _SHARE
        while len(entries) > self._most_entries or (len(entries) > 1 and sum(entry.added for entry in entries) > share):
            self._chains.release(entries.pop(0).chain)
        while self._chains.tokens > self._most_tokens and self._sessions:
            self.forget(next(iter(self._sessions)))

    def forget(self, session: str) -> None:
        """Forget a session that has ended."""
        for entry in self._sessions.pop(session, ()):
            self._chains.release(entry.chain)

    def continue_chat(self, session: str, rendered: array[int]) -> Continuation:
        """Find the ids to read for a prompt: those of the longest chat that it continues, then its own."""
        entries = self._sessions.get(session)
        if not entries:
            return Continuation(rendered, "new")
        self._sessions.move_to_end(session)
        lengths = [length for entry in entries for length in (entry.chain.length, entry.rendered[0])]
        beginnings = prefix_digests(rendered, [*lengths, len(rendered)])
        text: str | None = None
        for entry in sorted(entries, key=lambda entry: entry.chain.length, reverse=True):
            if beginnings.get(entry.chain.length) == entry.digest:
                return Continuation(rendered, "clean")
            if text is None:
                text = self._texts.decode(rendered)
            if (ids := self._realigned(entry, rendered, text, beginnings)) is not None:
                return Continuation(ids, "realigned")
        again = any(entry.rendered == (len(rendered), beginnings[len(rendered)]) for entry in entries)
        return Continuation(rendered, "new" if again else "forked")

    def _realigned(
        self, entry: _Entry, rendered: array[int], text: str, beginnings: Mapping[int, bytes]
    ) -> array[int] | None:
        if entry.text is None:
            known = self._texts.decode(entry.chain.ids())
            entry.text = (len(known), _text_digest(known))
        length, digest = entry.text
        if length <= len(text) and _text_digest(text[:length]) == digest:
            return entry.chain.ids() + self._texts.encode(text[length:])
        # The same message, written otherwise: arguments of calls come back as JSON of the template's own style.
        start, prompt = entry.rendered
        end = self._texts.end if entry.end is None else entry.end
        if end is None or len(rendered) <= start or beginnings.get(start) != prompt:
            return None
        stop = next(_positions(rendered, end, start), None)
        if stop is None:
            return None
        sampled, sent = (self._texts.decode(ids) for ids in (entry.response(), rendered[start:stop]))
        if _meaning(*self._texts.read(sampled, (), entry.demand)) != _meaning(*self._texts.read(sent, (), None)):
            return None
        return entry.chain.ids() + rendered[stop + (entry.end is not None) :]


def _digest(ids: array[int]) -> bytes:
    return prefix_digests(ids, [len(ids)])[len(ids)]


def _text_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _meaning(content: str, calls: Sequence[ToolCall]) -> tuple[str, list[Any]]:
    """What is the same for two texts of one message, however its calls are written; ids may be made up."""
    functions = [call["function"] for call in calls]
    return content, [(function["name"], msgspec.json.decode(function["arguments"])) for function in functions]


def _positions(ids: array[int], token: int, start: int) -> Iterator[int]:
    return (position for position in range(start, len(ids)) if ids[position] == token)
