"""How an environment's message becomes tokens: as it is, or between role boundaries of the model's chat template.

The ids of a chat template's message are found by tokens. Every observation is rendered as the end of a chat of three
short messages (question, answer, observation), and what the tokenizer makes of it after the answer is appended. So
whatever the template does to the message (trimming, quoting, wrapping) and whatever merges at the content's edges is
as the template has it, and a turn costs the same at the end of a long trajectory as at its beginning: one rendering
of a short chat, about 0.1 ms more than the content alone. Prepared frames around the content would save that, and be
wrong wherever the template or the tokenizer joins them with it: a header's "\\n" and a content's first one are often a
single token.
"""

from __future__ import annotations

import contextlib
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kuberoll_workers.data.tokenizer import ChatTokenizer, Tokenizer


class TemplateRefused(ValueError):
    """The chat template can't render observations token-exactly; says why, and what to do."""


class ObservationRefused(ValueError):
    """This observation can't be rendered, although others can."""


class ObservationTemplate(Protocol):
    """How an environment's message becomes tokens."""

    def render(self, role: str, content: str, *, previous: Sequence[int], generation_prompt: bool) -> array[int]:
        """Token ids to append to the policy's context for one message of the environment.

        Args:
            role, content: The message.
            previous: Ids of the response that it answers, as sampled; may be empty, and may lack its end-of-turn
                token. They are in the context already and never change.
            generation_prompt: Whether the policy is to answer the message; False after the episode's end.

        Raises:
            ObservationRefused: Nothing exact can be said for this message.
        """
        ...


class RawObservations:
    """The content's ids as they are, text of special tokens read as these; no tokens for an empty content."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(
        self,
        role: str,  # noqa: ARG002 - what is around the content is the environment's to write
        content: str,
        *,
        previous: Sequence[int],  # noqa: ARG002
        generation_prompt: bool,  # noqa: ARG002
    ) -> array[int]:
        return self._tokenizer.encode(content)


# Words of the probes: neither shares its first or last letter with its partner, so that no tokenizer gives the two a
# common first or last token.
_QUESTION = "hello"
_ANSWER, _OTHER_ANSWER = "quartz", "lemon"
_CONTENT, _OTHER_CONTENT = "velvet", "raisin"

_FALLBACK = "user"
_OWN_ROLE = "environment"
_ROLE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_MOST_ROLES = 64
"""Roles whose frames are kept: an environment that makes up names must not fill the memory."""


class _Unfit(Exception):
    """Boundaries can't be found by tokens for this role; says why."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """What the template writes around a content, for one role, with or without the generation prompt.

    Attributes:
        role: As it is handed to the template.
        answer: Ids of the probes' answer in the chat.
        head, tail: Ids before and after the content of a probe. `head` begins with an added token, which no text
            merges with; the ids next to the content may merge with it.
        closing: Number of ids in `head` that end the answer: up to the next added token.
        marks_before, marks_after: The guarded ids of `head` and `tail`.
        literal: Encodes text without reading guarded tokens in it; None where that would not be exact.
    """

    role: str
    answer: array[int]
    head: array[int]
    tail: array[int]
    closing: int
    marks_before: list[int]
    marks_after: list[int]
    literal: Callable[[str], array[int]] | None


class ChatTemplateObservations:
    """Role boundaries as the model's own chat template writes them, token-exactly.

    - What the response has of its end already (the end-of-turn token, and what the template writes after it) is not
      repeated; what it lacks is added. Another token that it may end with, such as `<|end_of_text|>` where the
      template ends turns with `<|eot_id|>`, was sampled and stays; the whole boundary follows it, as to the template
      it is a part of the answer.
    - A role that the template refuses or drops is rendered as `user`. So is `environment`, which a template that
      writes any name into its header takes although the model never saw it, unless the template has a token of its
      own for it.
    - Text in a content that spells a special token, or another token by which the template marks roles, is encoded as
      ordinary text: no observation ends its message or opens another one. The role is the environment's to choose;
      one that is not a plain word is rendered as `user`.
    - Earlier messages stay as they were sampled: where a template rewrites earlier turns (Qwen3 drops their
      `<think>` parts), the policy's context still has them.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        """Find the boundaries; about a second with a large vocabulary.

        Raises:
            TemplateRefused: There is no chat template, or its boundaries can't be found by tokens.
        """
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens()
        self._guarded = frozenset(token for token, special in self._added.items() if special)
        self._literal: Callable[[str], array[int]] | None = None
        try:
            # Some templates mark roles by added tokens that are not flagged as special (DeepSeek's <｜User｜>).
            for frame in self._inspect(_FALLBACK):
                self._guarded |= self._added.keys() & {*frame.head, *frame.tail}
            self._literal = tokenizer.encoder_without(self._guarded)
            self._frames = {_FALLBACK: self._inspect(_FALLBACK)}
        except _Unfit as unfit:
            raise TemplateRefused(
                f"the tokenizer's chat template can't render observations token-exactly: {unfit}; set "
                "rollout.observationTemplate: Raw, or give the tokenizer a chat template that can"
            ) from unfit

    def render(self, role: str, content: str, *, previous: Sequence[int], generation_prompt: bool) -> array[int]:
        """See `ObservationTemplate`; an empty content is a message too, and renders with its boundaries.

        Raises:
            ObservationRefused: The template does not take this content, or the content spells special tokens and
                this tokenizer can't encode them as text.
        """
        frame = self._frames_of(role)[generation_prompt]
        try:
            text = self._text(frame.role, content, generation_prompt)
        except _Unfit as unfit:
            raise ObservationRefused(f"the chat template can't render this observation: {unfit}") from unfit
        ids = self._tokenizer.encode(text)
        start = _end_of_answer(ids, frame)
        if start is None:
            raise ObservationRefused("because of this observation the chat template changes the answer before it")
        message = ids[start:]
        if self._marks(message) != frame.marks_before + frame.marks_after:
            message = self._disarmed(text, start, frame)
        return message[_overlap(previous, message, frame.closing) :]

    def _disarmed(self, text: str, start: int, frame: _Frame) -> array[int]:
        """Ids of a message whose content spells guarded tokens, these encoded as the text that they are.

        The template's own guarded tokens are the first and the last ones of the message. Nothing merges across them,
        so the text between the two that enclose the content is encoded for itself.

        Args:
            text: The rendered chat.
            start: Where the message begins in its ids.
        """
        if frame.literal is None:
            raise ObservationRefused(
                "the observation spells special tokens, and this tokenizer can't encode these as ordinary text; have "
                "the environment leave them out, or set rollout.observationTemplate: Raw to have them read as tokens"
            )
        ids, spans = self._tokenizer.encode_with_spans(text)
        marks = [at for at in range(start, len(ids)) if ids[at] in self._guarded]
        before, after = len(frame.marks_before), len(frame.marks_after)
        opening = marks[before - 1]
        ending = marks[-after] if after else len(ids)
        inner = text[spans[opening][1] : spans[ending][0] if after else len(text)]
        message = ids[start : opening + 1] + frame.literal(inner) + ids[ending:]
        if self._marks(message) != frame.marks_before + frame.marks_after:
            raise ObservationRefused("the observation changes the role boundaries that the chat template writes")
        return message

    def _marks(self, ids: Sequence[int]) -> list[int]:
        guarded = self._guarded
        return [token for token in ids if token in guarded]

    def _frames_of(self, role: str) -> tuple[_Frame, _Frame]:
        """The frames of a role, or of `user` in its place: without the generation prompt, and with it."""
        known = self._frames.get(role)
        if known is not None:
            return known
        user = self._frames[_FALLBACK]
        frames = user
        if _ROLE_NAME.fullmatch(role):
            with contextlib.suppress(_Unfit):
                frames = self._inspect(role)
        if role == _OWN_ROLE and frames[1].marks_before == user[1].marks_before:
            frames = user
        if len(self._frames) < _MOST_ROLES:
            self._frames[role] = frames
        return frames

    def _inspect(self, role: str) -> tuple[_Frame, _Frame]:
        """What the template writes around a content, seen by the ids that probes have in common.

        Raises:
            _Unfit: The role is refused or dropped, or where the answer or the content ends can't be told.
        """
        return self._frame(role, False), self._frame(role, True)

    def _frame(self, role: str, generation_prompt: bool) -> _Frame:
        text = self._text(role, _CONTENT, generation_prompt)
        ids = self._tokenizer.encode(text)
        other = self._tokenizer.encode(self._text(role, _CONTENT, generation_prompt, answer=_OTHER_ANSWER))
        begin, end = _difference(ids, other)
        answer, message = ids[begin:end], ids[end:]
        if self._tokenizer.decode(answer).count(_ANSWER) != 1:
            raise _Unfit("it does not write an assistant's message as it is, once")
        if not message or message[0] not in self._added or not self._added.keys().isdisjoint(answer):
            # Of ordinary text, the first token after a response would depend on the response's last one.
            raise _Unfit("no special token follows an assistant's message, so the message's end is not known by tokens")
        frame = _Frame(role, answer, message[:1], array(message.typecode), 1, [], [], None)
        another = self._tokenizer.encode(self._text(role, _OTHER_CONTENT, generation_prompt))
        if _end_of_answer(ids, frame) != end or (start := _end_of_answer(another, frame)) is None:
            raise _Unfit("an assistant's message is not to be told from the text around it")
        first, last = _difference(message, another[start:])
        content = message[first:last]
        if _CONTENT not in self._tokenizer.decode(content) or not self._added.keys().isdisjoint(content):
            raise _Unfit(f"it drops or rewrites a message of the role {role!r} that follows an assistant's")
        head, tail = message[:first], message[last:]
        if not head:
            raise _Unfit(f"it marks no beginning of a message of the role {role!r}")
        frame = _Frame(
            role=role,
            answer=answer,
            head=head,
            tail=tail,
            # Without a second added token the answer's end can't be told from the header: GLM's <|user|> is both.
            closing=next((at for at in range(1, len(head)) if head[at] in self._added), 1),
            marks_before=self._marks(head),
            marks_after=self._marks(tail),
            literal=self._literal,
        )
        # Encoding a part for itself is exact unless the tokenizer treats the beginning of a text differently from
        # what follows a special token; one that does shows it with the probe.
        exact = frame.marks_before and frame.literal and self._disarmed(text, end, frame) == message
        return frame if exact else replace(frame, literal=None)

    def _text(self, role: str, content: str, generation_prompt: bool, *, answer: str = _ANSWER) -> str:
        chat = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": answer},
            {"role": role, "content": content},
        ]
        try:
            return self._tokenizer.chat_text(chat, generation_prompt=generation_prompt)
        except Exception as error:
            # A template is foreign code, and what it raises its own affair: jinja's errors, a KeyError, a TypeError.
            raise _Unfit(f"it raises {type(error).__name__}: {error}") from error


def _difference(one: array[int], other: array[int]) -> tuple[int, int]:
    """Where `one` differs from `other`: from the end of their longest common beginning to that of their common end."""
    shorter = min(len(one), len(other))
    begin = next((at for at in range(shorter) if one[at] != other[at]), shorter)
    end = next((at for at in range(shorter - begin) if one[-1 - at] != other[-1 - at]), shorter - begin)
    return begin, len(one) - end


def _end_of_answer(ids: array[int], frame: _Frame) -> int | None:
    """Where the probes' answer ends: its first appearance, before the content, that the message's first id follows."""
    marker = frame.answer + frame.head[:1]
    at = -1
    while True:
        try:
            at = ids.index(marker[0], at + 1)
        except ValueError:
            return None
        if ids[at : at + len(marker)] == marker:
            return at + len(frame.answer)


def _overlap(previous: Sequence[int], message: array[int], closing: int) -> int:
    """How many of the message's first ids, `closing` at most, the response ends with already."""
    for size in range(closing, 0, -1):
        if len(previous) >= size and list(previous[-size:]) == list(message[:size]):
            return size
    return 0
