"""The few things the loop needs of a tokenizer, and the Hugging Face one behind them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kuberoll_workers.data.messages import token_array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> array[int]:
        """Ids of raw text: no special tokens are added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> array[int]:
        """Ids of a chat, rendered by the model's template, the generation prompt included."""
        ...


class HuggingFaceTokenizer:
    """A model's own tokenizer, loaded with transformers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # The Rust tokenizer answers without transformers' per-call padding and batching, 5 to 10 times faster.
        plain = tokenizer.is_fast and not getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._rust = tokenizer.backend_tokenizer if plain else None

    @classmethod
    def load(cls, source: str, *, revision: str | None = None) -> HuggingFaceTokenizer:
        """Load from a directory or the hub.

        Raises:
            OSError, ValueError: transformers' own, when there is no tokenizer.
        """
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(source, revision=revision))

    def encode(self, text: str) -> array[int]:
        if not text:
            return token_array()
        if self._rust is not None:
            return token_array(self._rust.encode(text, add_special_tokens=False).ids)
        return token_array(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        if self._rust is not None:
            return str(self._rust.decode(list(ids), skip_special_tokens=True))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> array[int]:
        ids: Any = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return token_array(ids)
