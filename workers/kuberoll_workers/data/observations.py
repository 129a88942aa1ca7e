"""Tokens of an environment's message: the interface, and the content's tokens as they are."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.tokenization import ChatTokenizer, Tokenizer

_ANCHORS = ("\n", "0", ".")
_PROBE = "velvet"


class ObservationRefused(ValueError):
    """This observation cannot be rendered, although others can."""


class ObservationTemplate(Protocol):
    """Conversion of an environment's message to tokens."""

    def render(self, role: str, content: str, *, previous: Sequence[int], generation_prompt: bool) -> array[int]:
        """Token ids to append to the policy's context for one message of the environment.

        Args:
            role, content: The message.
            previous: Ids of the preceding response, as sampled; may be empty, and may lack its end-of-turn token. They
                are in the context already and never change.
            generation_prompt: True if the policy will answer the message; False after the episode's end.

        Raises:
            ObservationRefused: This message cannot be rendered exactly.
        """
        ...

    def render_messages(
        self, messages: Sequence[Mapping[str, Any]], *, previous: Sequence[int], generation_prompt: bool
    ) -> array[int]:
        """Token ids to append for several messages, or for the answers to tool calls; see `render`.

        A template may group them, so their ids cannot be told apart.

        Args:
            messages: Chat messages, at least one: role, content and `ANSWER_FIELDS`.
        """
        ...


class RawObservations:
    """The content's ids unchanged; spelled-out special tokens are read as such, and an empty content has no tokens.

    Tokenizers of SentencePiece put a space before a text. An observation continues what a response has begun, so it
    gets none: its ids are those that it has behind other text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Texts, and their ids, behind which observations are encoded; none where a text has the same ids everywhere.
        real = isinstance(tokenizer, ChatTokenizer)
        anchors = [(anchor, tokenizer.encode(anchor)) for anchor in _ANCHORS if real]
        anchors = [(anchor, ids) for anchor, ids in anchors if self._behind(anchor, ids, _PROBE) is not None]
        spaced = bool(anchors) and self._behind(*anchors[0], _PROBE) != tokenizer.encode(_PROBE)
        self._anchors = anchors if spaced else []

    def _behind(self, anchor: str, ids: array[int], content: str) -> array[int] | None:
        """Ids of a content behind an anchor; None if the two share a token."""
        both = self._tokenizer.encode(anchor + content)
        return both[len(ids) :] if both[: len(ids)] == ids else None

    def _encode(self, content: str) -> array[int]:
        if not content:
            return token_array()
        for anchor, ids in self._anchors:
            if (found := self._behind(anchor, ids, content)) is not None:
                return found
        return self._tokenizer.encode(content)

    def render(
        self,
        role: str,  # noqa: ARG002 - the environment writes everything around the content
        content: str,
        *,
        previous: Sequence[int],  # noqa: ARG002
        generation_prompt: bool,  # noqa: ARG002
    ) -> array[int]:
        return self._encode(content)

    def render_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        previous: Sequence[int],  # noqa: ARG002
        generation_prompt: bool,  # noqa: ARG002
    ) -> array[int]:
        return self._encode("".join(message["content"] for message in messages))
