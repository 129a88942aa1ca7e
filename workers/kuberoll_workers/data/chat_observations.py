"""Tokens of an environment's message with the role boundaries of the model's chat template.

Every observation is rendered as the end of a chat of three short messages (question, answer,
observation), and the token ids after the answer are appended. So everything that the template does to the message
(trimming, quoting, wrapping) and all merges at the content's edges are exact. A turn costs the same at the end of a
long trajectory as at its beginning: one rendering of a short chat, about 0.1 ms more than the content alone.
Precomputed frames around the content would save that, but would be wrong whenever template or tokenizer merge them with
the content: a header's final newline and the content's first one are often a single token.
"""

from __future__ import annotations

import contextlib
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kuberoll_workers.data.messages import ANSWER_FIELDS, token_array
from kuberoll_workers.data.observations import ObservationRefused
from kuberoll_workers.data.tokenization import ChatTokenizer, TemplateRefused

# Words of the probes. No pair has a common first or last letter, so no tokenizer gives them a common first or last
# token.
_QUESTION = "hello"
_ANSWER, _OTHER_ANSWER = "quartz", "lemon"
_CONTENT, _OTHER_CONTENT = "velvet", "raisin"

_FALLBACK = "user"
_OWN_ROLE = "environment"
_PROBE_ID = "call00101"
"""A call's id as the loop makes them: some templates refuse ids of another length."""
_PROBE_NAME = "look"
"""Name of a tool whose answer has none."""
_ROLE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_MOST_ROLES = 64
"""Maximum number of cached roles: an environment that invents names must not fill the memory."""


_SPELLS_TOKENS = (
    "the observation spells special tokens, and this tokenizer can't encode these as ordinary text; have "
    "the environment leave them out, or set rollout.observationTemplate: Raw to have them read as tokens"
)


class _Unfit(Exception):
    """Boundaries cannot be found by tokens for this role; the message says why."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Tokens that the template writes around a content, for one role, with or without the generation prompt.

    Attributes:
        role: Role that is passed to the template.
        answer: Ids of the probe's answer in the chat.
        head, tail: Ids before and after the content of a probe. `head` begins with an added token, which no text
            merges with; the ids next to the content may merge with it.
        closing: Number of ids in `head` that end the answer: up to the next added token.
        marks_before, marks_after: The guarded ids of `head` and `tail`.
        literal: Encodes text without recognizing guarded tokens; None if that would not be exact.
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
    """Role boundaries as the model's own chat template writes them, token-exact.

    - The part of the boundary that the response already ends with (the end-of-turn token, and what the template writes
      after it) is not repeated; the rest is added. Another final token, such as `<|end_of_text|>` if the template ends
      turns with `<|eot_id|>`, was sampled and stays; the whole boundary follows it, because to the template it is a
      part of the answer.
    - A role that the template rejects or drops is rendered as `user`. So is `environment`, unless the template has a
      special token for it: templates that write any name into the header accept it, but the model has never seen it.
    - Text in a content that spells a special token, or another token that marks roles, is encoded as ordinary text: no
      observation can end its message or start another one. The environment chooses the role; one that is not a plain
      word is rendered as `user`.
    - Earlier messages stay as they were sampled: if a template rewrites earlier turns (Qwen3 drops their `<think>`
      parts), the policy's context still has them.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        """Find the boundaries; takes about a second with a large vocabulary.

        Raises:
            TemplateRefused: There is no chat template, or its boundaries cannot be found by tokens.
        """
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens()
        self._guarded = frozenset(token for token, special in self._added.items() if special)
        self._literal: Callable[[str], array[int]] | None = None
        # Known after the first answers to calls that the template drops elsewhere.
        self._knows_calls: bool | None = None
        try:
            # Some templates mark roles by added tokens that are not flagged as special (DeepSeek's <｜User｜>).
            for frame in self._inspect(_FALLBACK):
                self._guarded |= self._added.keys() & {*frame.head, *frame.tail}
            self._literal = tokenizer.encoder_without(self._guarded)
            self._frames = {(_FALLBACK, False): self._inspect(_FALLBACK)}
        except _Unfit as unfit:
            # Without the cause: a template raises anything, and what is not known as lasting would be tried again.
            raise TemplateRefused(
                f"the chat template can't render observations token-exactly: {unfit}; set "
                "rollout.observationTemplate: Raw, or write a chat template that can in generation.model.chatTemplate"
            ) from None

    def render(self, role: str, content: str, *, previous: Sequence[int], generation_prompt: bool) -> array[int]:
        """See `ObservationTemplate`; an empty content is also rendered with its boundaries.

        Raises:
            ObservationRefused: The template rejects this content, or it spells special tokens that this tokenizer
                cannot encode as text.
        """
        frame = self._frames_of(role)[generation_prompt]
        try:
            text = self._text(frame.role, content, generation_prompt)
        except _Unfit as unfit:
            raise ObservationRefused(f"the chat template can't render this observation: {unfit}") from unfit
        ids = self._tokenizer.encode(text)
        start = _end_of_answer(ids, frame)
        if start is None:
            raise ObservationRefused("with this observation the chat template changes the preceding answer")
        message = ids[start:]
        if self._marks(message) != frame.marks_before + frame.marks_after:
            message = self._disarmed(text, start, frame)
        return message[_overlap(previous, message, frame.closing) :]

    def render_messages(
        self, messages: Sequence[Mapping[str, Any]], *, previous: Sequence[int], generation_prompt: bool
    ) -> array[int]:
        """See `ObservationTemplate`.

        Messages that become `user` because the template rejects their roles are one message, a line each.

        Raises:
            ObservationRefused: See `render`.
        """
        if (calls := self._calls_answered(messages)) is not None:
            return self._after_calls(messages, calls, previous=previous, generation_prompt=generation_prompt)
        chat = self._known_roles(messages)
        if len(chat) == 1 and len(chat[0]) == 2:
            only = chat[0]
            return self.render(only["role"], only["content"], previous=previous, generation_prompt=generation_prompt)
        frame = self._frames_of(chat[0]["role"], call="tool_call_id" in chat[0])[generation_prompt]
        try:
            text = self._chat_text(chat, generation_prompt)
            bare = self._chat_text(_probes(chat), generation_prompt)
        except _Unfit as unfit:
            raise ObservationRefused(f"the chat template can't render these observations: {unfit}") from unfit
        ids, expected = self._tokenizer.encode(text), self._tokenizer.encode(bare)
        start, begin = _end_of_answer(ids, frame), _end_of_answer(expected, frame)
        if start is None or begin is None:
            raise ObservationRefused("with these observations the chat template changes the preceding answer")
        message, marks = ids[start:], self._marks(expected[begin:])
        if self._marks(message) != marks:
            message = self._several_disarmed(text, start, frame, self._regions(chat, text, bare, generation_prompt))
            if self._marks(message) != marks:
                raise ObservationRefused("the observations change the role boundaries that the chat template writes")
        return message[_overlap(previous, message, frame.closing) :]

    def _calls_answered(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """The calls that messages answer, if the template takes answers after them only; else None."""
        answers = [message for message in messages if "tool_call_id" in message and message["role"] != _FALLBACK]
        # All of one role nearly always.
        if not answers or all(self._frames_of(answer["role"], call=True)[True].role != _FALLBACK for answer in answers):
            return None
        if self._knows_calls is None:
            self._knows_calls = self._renders_calls()
        if not self._knows_calls:
            return None
        return [_call(answer["tool_call_id"], answer.get("name") or _PROBE_NAME) for answer in answers]

    def _renders_calls(self) -> bool:
        """True if the template writes an assistant's calls; some know nothing of them."""
        try:
            calls = [[_call(_PROBE_ID, name)] for name in (_ANSWER, _OTHER_ANSWER)]
            one, other = (self._chat_text([], False, calls=call) for call in calls)
        except _Unfit:
            return False
        return one != other

    def _after_calls(
        self,
        messages: Sequence[Mapping[str, Any]],
        calls: Sequence[Mapping[str, Any]],
        *,
        previous: Sequence[int],
        generation_prompt: bool,
    ) -> array[int]:
        """Ids of messages that answer calls, by a template that takes such messages after an assistant's calls only.

        The boundary begins with the last added token after the calls that the template writes with and without answers:
        it ends the calls.

        Raises:
            ObservationRefused: The template drops the answers even there, or its boundary cannot be found.
        """
        unfit = "the chat template can't render answers to tool calls after the calls"
        chat = [message if "tool_call_id" in message else self._known_roles([message])[0] for message in messages]
        try:
            before = self._tokenizer.encode(self._chat_text([], False, calls=calls))
            other = self._chat_text([], False, calls=[*calls[:-1], {**calls[-1], **_call(calls[-1]["id"], _ANSWER)}])
            text = self._chat_text(chat, generation_prompt, calls=calls)
            bare = self._chat_text(_probes(chat), generation_prompt, calls=calls)
        except _Unfit as error:
            raise ObservationRefused(f"{unfit}: {error}") from error
        ids, expected = self._tokenizer.encode(text), self._tokenizer.encode(bare)
        _, end = _difference(before, self._tokenizer.encode(other))
        common = min(_difference(before, ids)[0], _difference(before, expected)[0])
        start = next((at for at in range(common - 1, end - 1, -1) if before[at] in self._added), None)
        if start is None:
            raise ObservationRefused(f"{unfit}: no special token ends the calls")
        if any(bare.count(probe["content"]) != 1 for probe in _probes(chat)):
            raise ObservationRefused(f"{unfit}: it does not write each answer exactly once")
        message, marks = ids[start:], self._marks(expected[start:])
        if self._marks(message) != marks:
            regions = self._regions(chat, text, bare, generation_prompt, calls)
            message = self._several_disarmed(text, start, self._frames_of(_FALLBACK)[generation_prompt], regions)
            if self._marks(message) != marks:
                raise ObservationRefused("the observations change the role boundaries that the chat template writes")
        return message[_overlap(previous, message, 1) :]

    def _known_roles(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with roles that the template takes."""
        known: list[dict[str, Any]] = []
        joined = False
        for message in messages:
            role = message["role"]
            call = role != _FALLBACK and "tool_call_id" in message
            taken = self._frames_of(role, call=call)[True].role
            becomes_user = taken == _FALLBACK != role
            if becomes_user and joined:
                known[-1] = {**known[-1], "content": f"{known[-1]['content']}\n{message['content']}"}
            else:
                known.append({"role": taken, "content": message["content"]})
                if not becomes_user:
                    known[-1] |= {name: message[name] for name in ANSWER_FIELDS if name in message}
            joined = becomes_user
        return known

    def _regions(
        self,
        chat: Sequence[Mapping[str, Any]],
        text: str,
        bare: str,
        generation_prompt: bool,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> list[tuple[int, int]]:
        """Where the template has written each content in a text.

        Args:
            text: The rendered chat.
            bare: The same with a word in place of each content.
        """
        probes = _probes(chat)
        words = [probe["content"] for probe in probes]
        if any(bare.count(word) != 1 for word in words):
            raise ObservationRefused("the chat template does not write these observations exactly once")
        places = [bare.find(word) for word in words]
        lengths: list[int] = []
        for number, message in enumerate(chat):
            # All others are words, so the rest of the text is the template's.
            one = self._chat_text([*probes[:number], message, *probes[number + 1 :]], generation_prompt, calls=calls)
            before, after = bare[: places[number]], bare[places[number] + len(words[number]) :]
            if not (one.startswith(before) and one.endswith(after) and len(one) >= len(before) + len(after)):
                raise ObservationRefused("with these observations the chat template changes other messages")
            lengths.append(len(one) - len(before) - len(after))
        regions: list[tuple[int, int]] = []
        at = end = 0
        for place, word, length in zip(places, words, lengths, strict=True):
            if text[at : at + place - end] != bare[end:place]:
                raise ObservationRefused("with these observations the chat template changes other messages")
            at += place - end
            regions.append((at, at + length))
            at, end = at + length, place + len(word)
        if text[at:] != bare[end:]:
            raise ObservationRefused("with these observations the chat template changes other messages")
        return regions

    def _several_disarmed(self, text: str, start: int, frame: _Frame, regions: Sequence[tuple[int, int]]) -> array[int]:
        """Ids of messages whose contents spell guarded tokens, with these encoded as ordinary text; see `_disarmed`.

        Args:
            regions: Where the contents are in the text.
        """
        if frame.literal is None:
            raise ObservationRefused(_SPELLS_TOKENS)
        ids, spans = self._tokenizer.encode_with_spans(text)
        message = token_array()
        begin, spelled, opened = start, False, False
        for at in range(start, len(ids) + 1):
            own = at == len(ids)
            if not own and ids[at] in self._guarded:
                own = not any(low <= spans[at][0] and spans[at][1] <= high for low, high in regions)
                spelled = spelled or not own
            if not own:
                continue
            if spelled and not opened:
                raise ObservationRefused(_SPELLS_TOKENS)
            until = spans[at][0] if at < len(ids) else len(text)
            message += frame.literal(text[spans[begin - 1][1] : until]) if spelled else ids[begin:at]
            message += ids[at : at + 1]
            begin, spelled, opened = at + 1, False, True
        return message

    def _disarmed(self, text: str, start: int, frame: _Frame) -> array[int]:
        """Ids of a message whose content spells guarded tokens, with these encoded as ordinary text.

        The template's own guarded tokens are the first and the last ones of the message. Nothing merges across them,
        so the text between the two that enclose the content is encoded separately.

        Args:
            text: The rendered chat.
            start: Start of the message in the chat's ids.
        """
        if frame.literal is None:
            raise ObservationRefused(_SPELLS_TOKENS)
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

    def _frames_of(self, role: str, *, call: bool = False) -> tuple[_Frame, _Frame]:
        """Frames of a role, or of `user` in its place: without and with the generation prompt.

        Args:
            call: The message has the id of a tool call.
        """
        known = self._frames.get((role, call))
        if known is not None:
            return known
        user = self._frames[_FALLBACK, False]
        frames = user
        if _ROLE_NAME.fullmatch(role):
            with contextlib.suppress(_Unfit):
                frames = self._inspect(role, call=call)
        if role == _OWN_ROLE and frames[1].marks_before == user[1].marks_before:
            frames = user
        if len(self._frames) < _MOST_ROLES:
            self._frames[role, call] = frames
        return frames

    def _inspect(self, role: str, *, call: bool = False) -> tuple[_Frame, _Frame]:
        """Find the template's tokens around a content: those that several probes have in common.

        Raises:
            _Unfit: The role is rejected or dropped, or the end of the answer or the content cannot be determined.
        """
        return self._frame(role, False, call), self._frame(role, True, call)

    def _frame(self, role: str, generation_prompt: bool, call: bool) -> _Frame:
        text = self._text(role, _CONTENT, generation_prompt, call=call)
        ids = self._tokenizer.encode(text)
        other = self._tokenizer.encode(self._text(role, _CONTENT, generation_prompt, answer=_OTHER_ANSWER, call=call))
        begin, end = _difference(ids, other)
        answer, message = ids[begin:end], ids[end:]
        if self._tokenizer.decode(answer).count(_ANSWER) != 1:
            raise _Unfit("it does not write an assistant's message unchanged and exactly once")
        if not message or message[0] not in self._added or not self._added.keys().isdisjoint(answer):
            # The first token of ordinary text after a response would depend on the response's last one.
            raise _Unfit("no special token follows an assistant's message, so its end cannot be found by tokens")
        frame = _Frame(role, answer, message[:1], array(message.typecode), 1, [], [], None)
        another = self._tokenizer.encode(self._text(role, _OTHER_CONTENT, generation_prompt, call=call))
        if _end_of_answer(ids, frame) != end or (start := _end_of_answer(another, frame)) is None:
            raise _Unfit("an assistant's message cannot be distinguished from the text around it")
        first, last = _difference(message, another[start:])
        content = message[first:last]
        if _CONTENT not in self._tokenizer.decode(content) or not self._added.keys().isdisjoint(content):
            raise _Unfit(f"it drops or rewrites a message of the role {role!r} that follows an assistant's")
        head, tail = message[:first], message[last:]
        if not head:
            raise _Unfit(f"it does not mark the beginning of a message of the role {role!r}")
        frame = _Frame(
            role=role,
            answer=answer,
            head=head,
            tail=tail,
            # Without a second added token the end of the answer and the header are the same: GLM's <|user|> is both.
            closing=next((at for at in range(1, len(head)) if head[at] in self._added), 1),
            marks_before=self._marks(head),
            marks_after=self._marks(tail),
            literal=self._literal,
        )
        # Encoding a part separately is exact, unless the tokenizer treats the beginning of a text differently from text
        # after a special token. The probe detects such a tokenizer.
        exact = frame.marks_before and frame.literal and self._disarmed(text, end, frame) == message
        return frame if exact else replace(frame, literal=None)

    def _text(
        self, role: str, content: str, generation_prompt: bool, *, answer: str = _ANSWER, call: bool = False
    ) -> str:
        message = {"role": role, "content": content, **({"tool_call_id": _PROBE_ID} if call else {})}
        return self._chat_text([message], generation_prompt, answer=answer)

    def _chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        generation_prompt: bool,
        *,
        answer: str = _ANSWER,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        said: dict[str, Any] = {"role": "assistant", "content": "" if calls else answer}
        if calls:
            said["tool_calls"] = calls
        chat = [{"role": "user", "content": _QUESTION}, said, *messages]
        try:
            return self._tokenizer.chat_text(chat, generation_prompt=generation_prompt)
        except Exception as error:
            # A template is foreign code and may raise anything: jinja's errors, a KeyError, a TypeError.
            raise _Unfit(f"it raises {type(error).__name__}: {error}") from error


def _call(identity: str, name: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": f'{{"{_PROBE_NAME}": 1}}'}}


def _probes(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a word in place of each content, none of which is within another one."""
    return [{**message, "content": f"{_CONTENT}{number:04}"} for number, message in enumerate(chat)]


def _difference(one: array[int], other: array[int]) -> tuple[int, int]:
    """Range in which `one` differs from `other`: between their longest common beginning and end."""
    shorter = min(len(one), len(other))
    begin = next((at for at in range(shorter) if one[at] != other[at]), shorter)
    end = next((at for at in range(shorter - begin) if one[-1 - at] != other[-1 - at]), shorter - begin)
    return begin, len(one) - end


def _end_of_answer(ids: array[int], frame: _Frame) -> int | None:
    """End of the probe's answer: its first occurrence that is followed by the message's first id."""
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
    """Number of the message's first ids, at most `closing`, with which the response already ends."""
    for size in range(closing, 0, -1):
        if len(previous) >= size and list(previous[-size:]) == list(message[:size]):
            return size
    return 0
