"""The calls of a session as a tree of token sequences, and the paths through it that a trainer may learn from."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import msgspec

from kuberoll_workers.data.call_prefixes import CallPrefixes, paths
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.tools import Tool, ToolCall
from kuberoll_workers.serving.openai_api.chats import added_messages, repeated_calls
from kuberoll_workers.serving.openai_api.exchange import ChatMessage, Sampled

# About what the objects of a call take beside its tokens and texts.
_CALL_BYTES: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A response in its place in the tree.

    Attributes:
        parent: Index of the call whose prompt and response this one's prompt begins with; None: of no other.
        read: Ids of the prompt after those of the parent.
        sampled: The response; its `prompt` is empty, and its `chat` None.
        chat: Messages of the request that the parent's did not have; None: unknown.
        chat_length: Number of all messages of the request.
        repeated: Calls of tools in the parent's response, as the request repeats them.
        tools: Functions that the request declares; for a call with a parent, see the first one of its path.
    """

    parent: int | None
    read: array[int]
    sampled: Sampled
    chat: Sequence[ChatMessage] | None = None
    chat_length: int = 0
    repeated: Sequence[ToolCall] = ()
    tools: Sequence[Tool] = ()


class Segment(NamedTuple):
    """A part of a path.

    Attributes:
        token_ids: Its ids.
        call: Index of the call that sampled them; None: the model only read them.
        learn: False for what was only read, and for a response that an earlier path has, too.
        chat: Messages that were read; None: unknown.
    """

    token_ids: array[int]
    call: int | None
    learn: bool
    chat: Sequence[ChatMessage] | None = None


class CallTree:
    """The calls of a session, in the order in which they ended.

    Attributes:
        lost: Indices of calls whose answers the caller did not get, and asked for again; no path has them.
        tokens: Number of different tokens that were read and sampled.
        path_tokens: Number of tokens of all paths, in which branches repeat what they have in common.
        size: Number of bytes that it holds.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.lost: set[int] = set()
        self._prefixes = CallPrefixes()
        # Of each call: the number of tokens of its path, and that of the calls that continue it.
        self._depths: list[int] = []
        self._continued: list[int] = []
        self.tokens = self.path_tokens = self.size = 0

    def add(self, sampled: Sampled) -> Call:
        """Add a response below the longest call that its prompt begins with."""
        parent, begun = self._prefixes.parent(sampled.prompt)
        chat = sampled.chat
        repeated: Sequence[ToolCall] = ()
        if chat is not None and parent is not None:
            before = self.calls[parent].chat_length
            chat, repeated = added_messages(chat, before), repeated_calls(chat, before)
        call = Call(
            parent=parent,
            read=sampled.prompt[begun:],
            sampled=replace(sampled, prompt=token_array(), chat=None, tools=()),
            chat=chat or None,
            chat_length=len(sampled.chat or ()),
            repeated=repeated,
            # A prompt that begins with those of another call has its tools, too.
            tools=sampled.tools if parent is None else (),
        )
        self._prefixes.add(len(self.calls), sampled.prompt, sampled.response)
        self.calls.append(call)
        self._count(call)
        return call

    def lose(self, calls: Sequence[int]) -> bool:
        """Leave calls out whose answer the caller did not get; False, and nothing changes, if one was continued."""
        if any(self._continued[index] for index in calls):
            return False
        for index in calls:
            self.lost.add(index)
            self._prefixes.remove(index)
            self.path_tokens -= self._depths[index]
        return True

    def paths(self) -> list[list[Segment]]:
        """The paths from a root to a leaf, in the order of their leaves; each response is to be learned from once."""
        learned: set[int] = set()
        chains = paths([call.parent for call in self.calls])
        return [list(self._segments(chain, learned)) for chain in chains if chain[-1] not in self.lost]

    def leaves(self) -> Iterator[int]:
        """Indices of the calls at the ends of the paths."""
        return (index for index, count in enumerate(self._continued) if not count and index not in self.lost)

    def _count(self, call: Call) -> None:
        added = len(call.read) + len(call.sampled.response)
        depth = added
        self.tokens += added
        self.path_tokens += added
        if call.parent is not None:
            depth += self._depths[call.parent]
            if self._continued[call.parent]:
                self.path_tokens += self._depths[call.parent]
            self._continued[call.parent] += 1
        self._depths.append(depth)
        self._continued.append(0)
        self.size += _CALL_BYTES + sum(
            len(values) * values.itemsize for values in (call.read, call.sampled.response, call.sampled.logprobs)
        )
        if call.chat or call.repeated or call.tools:
            self.size += len(msgspec.json.encode((call.chat, call.repeated, call.tools)))

    def _segments(self, chain: Sequence[int], learned: set[int]) -> Iterator[Segment]:
        read, chat = token_array(), list[ChatMessage]()
        for index in chain:
            call = self.calls[index]
            # What follows an empty response was read together with what precedes it.
            read, chat = read + call.read, [*chat, *(call.chat or ())]
            if call.sampled.response:
                if read:
                    yield Segment(read, None, learn=False, chat=chat or None)
                yield Segment(call.sampled.response, index, learn=index not in learned)
                read, chat = token_array(), []
            learned.add(index)
        if read:
            yield Segment(read, None, learn=False, chat=chat or None)
