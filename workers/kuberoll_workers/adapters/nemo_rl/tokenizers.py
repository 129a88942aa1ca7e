"""Adapters of the caller's tokenizer to the loop's interface."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from kuberoll_workers.adapters.nemo_rl.message_logs import token_ids_of
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.tokenization import Tokenizer
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer

if TYPE_CHECKING:
    import torch


class ForeignTokenizer:
    """A tokenizer used only through the methods that NeMo RL uses: a call to encode, and `batch_decode`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = None

    def encode(self, text: str) -> array[int]:
        if not text:
            return token_array()
        encoded = self._tokenizer(text, return_tensors="pt", add_special_tokens=False)
        ids = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded.input_ids
        return token_array(token_ids_of(ids[0]).tolist())

    def decode(self, ids: Sequence[int]) -> str:
        import torch

        return decode_all(self._tokenizer, [torch.from_numpy(numpy.array(ids, dtype=numpy.int64))])[0]

    def decode_with_special_tokens(self, ids: Sequence[int]) -> str:
        # `batch_decode` is all that is known of it, and prompts come without tools, whose calls such tokens may mark.
        return self.decode(ids)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> array[int]:
        raise NotImplementedError("prompts come with their token ids")


def tokenizer_of(tokenizer: Any) -> Tokenizer:
    """Adapt a tokenizer to the loop; Hugging Face's fast ones are used without tensors."""
    return HuggingFaceTokenizer(tokenizer) if _is_fast(tokenizer) else ForeignTokenizer(tokenizer)


def decode_all(tokenizer: Any, responses: Sequence[torch.Tensor]) -> list[str]:
    """Texts of several responses, special tokens left out.

    Raises:
        ValueError: The tokenizer returned more or fewer texts.
    """
    if _is_fast(tokenizer):
        fast = HuggingFaceTokenizer(tokenizer)
        return [fast.decode(ids.tolist()) for ids in responses]
    texts = tokenizer.batch_decode(list(responses), skip_special_tokens=True)
    if len(texts) != len(responses):
        raise ValueError(f"batch_decode returned {len(texts)} texts for {len(responses)} responses")
    return [str(text) for text in texts]


def pad_token_of(tokenizer: Any) -> int:
    """The padding token of batches; 0 for a tokenizer without one, since padding is never read."""
    pad = getattr(tokenizer, "pad_token_id", None)
    return pad if isinstance(pad, int) else 0


def _is_fast(tokenizer: Any) -> bool:
    # Without transformers loaded it is none of theirs.
    transformers = sys.modules.get("transformers")
    return (
        transformers is not None and isinstance(tokenizer, transformers.PreTrainedTokenizerBase) and tokenizer.is_fast
    )
