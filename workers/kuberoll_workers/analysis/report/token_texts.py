"""Text of each token of a response, where the tokenizer is at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.data.tokenizer_files import read_tokenizer, tokenizer_directory

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MOST_CACHED = 1 << 18


class Decoder(Protocol):
    """The part of a tokenizer that texts of tokens need."""

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        ...


class TokenTexts:
    """Divides texts of responses among their tokens."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers write no space before a text's first token, so each one is decoded behind another.
        self._before = list(tokenizer.encode("a"))[-1:]
        self._skipped = len(tokenizer.decode(self._before))
        self._known: dict[int, str] = {}

    def pieces(self, ids: Sequence[int], content: str) -> list[str] | None:
        """Text of each token; empty for a special token, or one that ends within a character.

        Args:
            content: The decoded ids.

        Returns:
            Texts whose concatenation is `content`; None if it is not what this tokenizer decodes.
        """
        known = self._known
        found = [known[token] if token in known else self._piece(token) for token in ids]
        if found and self._before:
            # The first one has a text of its own, see above.
            found[0] = self._tokenizer.decode(ids[:1])
        if "".join(found) != content:
            found = self._in_context(ids)
        return found if "".join(found) == content else None

    def _piece(self, token: int) -> str:
        piece = self._tokenizer.decode([*self._before, token])[self._skipped :]
        if len(self._known) < _MOST_CACHED:
            self._known[token] = piece
        return piece

    def _in_context(self, ids: Sequence[int]) -> list[str]:
        """Texts of tokens that share characters: a character belongs to the token that completes it."""
        found: list[str] = []
        start = complete = 0
        for end in range(1, len(ids) + 1):
            before = self._tokenizer.decode(ids[start:complete])
            text = self._tokenizer.decode(ids[start:end])
            if text.endswith(_INCOMPLETE) and end < len(ids):
                found.append("")
                continue
            found.append(text[len(before) :])
            start, complete = complete, end
        return found


class TokenizerUnusable(ValueError):
    """There is no tokenizer at this place; the message says why."""


def load_texts(source: str) -> TokenTexts:
    """Texts of the tokens of a tokenizer, loaded by any means.

    Args:
        source: Directory or hub id.

    Raises:
        TokenizerUnusable: It cannot be loaded.
    """
    try:
        return TokenTexts(HuggingFaceTokenizer.load(source))
    except Exception as error:
        # transformers' errors are of many types.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TokenizerUnusable(f"--tokenizer {source}: no tokenizer could be loaded: {reason}") from error


def stored_tokenizer(source: str | None, revision: str | None = None) -> TokenTexts | None:
    """Texts of the tokens of a model whose tokenizer is on this machine; no network, and no transformers.

    Args:
        source: Directory or hub id.

    Returns:
        None if it is not here, or only transformers can read it.
    """
    directory = None if source is None else tokenizer_directory(source, revision, stored=True)
    try:
        found = None if directory is None else read_tokenizer(directory)
        return None if found is None else TokenTexts(HuggingFaceTokenizer(found))
    except Exception:
        # Files of any model and version; the report can do without it.
        return None
