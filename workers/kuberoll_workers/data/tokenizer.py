"""The tokenizer's interface for the loop, and its implementation with Hugging Face tokenizers."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.tokenizer_files import FILES, FileTokenizer, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_log = logging.getLogger(__name__)

LONG_TEXT = 1 << 15
"""Length in characters from which encoding takes so long, about 50 ms, that it needs a separate thread."""


class Tokenizer(Protocol):
    """Conversion between text and token ids."""

    def encode(self, text: str) -> array[int]:
        """Ids of raw text; no special tokens are added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> array[int]:
        """Ids of a chat, rendered by the model's template, with the generation prompt."""
        ...


class ChatTokenizer(Tokenizer, Protocol):
    """Additional functions for exact role boundaries."""

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool) -> str:
        """A chat as the model's template writes it.

        Raises:
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


def load_tokenizer(source: str, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer from a directory or the hub.

    Raises:
        OSError, ValueError: transformers' own, when there is no tokenizer.
    """
    # Without PyTorch, as in the worker image, transformers recommends it; tokenizers do not need it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    # Use the process's own log handlers: a pod's log is JSON lines, and transformers' handler writes plain text.
    transformers.logging.disable_default_handler()
    transformers.logging.enable_propagation()
    found: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(source, revision=revision)
    return found


def _directory_of(source: str, revision: str | None) -> Path | None:
    """The directory with a tokenizer's files; None if the hub did not give them."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        # Into the cache that transformers uses, too.
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(FILES)))
    except Exception:
        # Its many exceptions all mean the same here; transformers gives the reason in its own words.
        _log.debug("%s: not loaded from the hub", source, exc_info=True)
        return None


class HuggingFaceTokenizer:
    """A model's own tokenizer: transformers', or one that was read from the same files."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | FileTokenizer) -> None:
        self._tokenizer = tokenizer
        # The Rust tokenizer avoids transformers' per-call padding and batching, and is 5 to 10 times faster.
        plain = tokenizer.is_fast and not getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._rust = tokenizer.backend_tokenizer if plain else None
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None

    @classmethod
    def load(cls, source: str, *, revision: str | None = None) -> HuggingFaceTokenizer:
        """Load from a directory or the hub; without transformers where the files say all.

        Raises:
            OSError, ValueError: transformers' own, when there is no tokenizer.
        """
        directory = _directory_of(source, revision)
        found = None if directory is None else read_tokenizer(directory)
        return cls(load_tokenizer(source, revision=revision) if found is None else found)

    @property
    def vocabulary(self) -> int:
        """Number of token ids, including added ones; all ids are below it."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return max(len(self._tokenizer), 1 + max(added, default=-1))

    def encode(self, text: str) -> array[int]:
        if not text:
            return token_array()
        if self._rust is not None:
            if len(text) > LONG_TEXT:
                # A batch is encoded without the interpreter's lock, so other threads continue.
                return token_array(self._rust.encode_batch([text], add_special_tokens=False)[0].ids)
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

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool) -> str:
        text: Any = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=generation_prompt, tokenize=False
        )
        return str(text)

    def added_tokens(self) -> dict[int, bool]:
        decoder: Mapping[int, Any] = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {token: bool(added.special) for token, added in decoder.items()}

    def encode_with_spans(self, text: str) -> tuple[array[int], list[tuple[int, int]]]:
        if self._backend is None:
            raise NotImplementedError("only Rust tokenizers report the positions of tokens")
        encoding = self._backend.encode(text, add_special_tokens=False)
        return token_array(encoding.ids), encoding.offsets

    def encoder_without(self, tokens: Collection[int]) -> Callable[[str], array[int]] | None:
        if self._backend is None:
            return None
        from tokenizers import Tokenizer as RustTokenizer

        # A second tokenizer, because special tokens are a global setting, and other threads encode at the same time.
        state = orjson.loads(self._backend.to_str())
        for added in state["added_tokens"]:
            added["special"] = added["id"] in tokens
        blind = RustTokenizer.from_str(orjson.dumps(state).decode())
        blind.encode_special_tokens = True
        return lambda text: token_array(blind.encode(text, add_special_tokens=False).ids)
