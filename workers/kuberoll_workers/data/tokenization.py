"""The tokenizer's interface for the loop."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

LONG_TEXT = 1 << 15
"""Length in characters from which encoding takes so long, about 50 ms, that it needs a separate thread."""


class TemplateRefused(ValueError):
    """The chat template cannot be used as the job wants it; the message says why, and names the remedy."""


class Tokenizer(Protocol):
    """Conversion between text and token ids."""

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids; all are below it. None: unknown."""
        ...

    def encode(self, text: str) -> array[int]:
        """Ids of raw text; no special tokens are added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        ...

    def decode_with_special_tokens(self, ids: Sequence[int]) -> str:
        """Text of ids, with special tokens: some models mark calls of tools by these."""
        ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> array[int]:
        """Ids of a chat, rendered by the model's template, with the generation prompt.

        Raises:
            TemplateRefused: The template leaves the tools out.
            Exception: It rejects the messages; templates raise arbitrary errors.
        """
        ...


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """Additional functions for exact role boundaries."""

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """A chat as the model's template writes it.

        Raises:
            TemplateRefused: The template leaves the tools out.
            Exception: There is no template, or it rejects the messages; templates raise arbitrary exceptions.
        """
        ...

    def added_tokens(self) -> Mapping[int, bool]:
        """Ids of tokens that are found in a text before all others, so that nothing merges across them.

        The value is True if the token is flagged as special.
        """
        ...

    def encode_with_spans(self, text: str) -> tuple[array[int], list[tuple[int, int]]]:
        """The ids of `encode`, and the character range of each in the text, end exclusive."""
        ...

    def encoder_without(self, tokens: Collection[int]) -> Callable[[str], array[int]] | None:
        """An `encode` that treats these added tokens as ordinary text; None if that is impossible."""
        ...
