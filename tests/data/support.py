"""Small tokenizers with the special tokens and the splitting of well-known models, and these models' templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer

TEMPLATES = Path(__file__).parent / "templates"
TINY = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-policy"

# Llama 3's; Qwen's differs in the digits only. Both merge line ends with each other and with what is before them.
_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEXT = [
    "the user asked\n\nand the assistant answered.\n\n\nsystem model tool environment ipython\n",
    'hello >\n\n "velvet" "raisin"\n<tool_response>\n\n</tool_response>\n quartz lemon\n  hello   there\n\t\tend.\n',
] * 4


def byte_level(special: Sequence[str], *, normalizer: Any = None) -> Tokenizer:
    """A byte-level BPE that merges line ends, as GPT-2's heirs do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def sentence_pieces(special: Sequence[str]) -> Tokenizer:
    """A BPE over whole texts, spaces written ▁ and unknown characters as bytes, as Gemma's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    tokenizer.train_from_iterator(_TEXT, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for piece in ("<unk>", *(f"<0x{byte:02X}>" for byte in range(256))):
        vocabulary[piece] = len(vocabulary)
    state["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(special))
    return tokenizer


@dataclass(frozen=True)
class Model:
    """A model family: its tokenizer as transformers has it, as KubeRoll has it, and what is known of its template.

    Attributes:
        end: Text of the end-of-turn token.
        after_end: What the template writes between it and the next message.
        stray: Another token that ends a text.
        header: What the template writes before a user's message.
        knows_tool: Whether the template takes messages of the role `tool`.
        trims: Whether it takes the spaces off a message.
    """

    name: str
    hugging_face: PreTrainedTokenizerFast
    end: str
    after_end: str
    stray: str
    header: str
    knows_tool: bool
    trims: bool

    @property
    def tokenizer(self) -> HuggingFaceTokenizer:
        return HuggingFaceTokenizer(self.hugging_face)

    def id(self, token: str) -> int:
        found: int = self.hugging_face.convert_tokens_to_ids(token)
        return found

    def chat(self, messages: Sequence[dict[str, str]], *, generation_prompt: bool = True) -> list[int]:
        """Ids of a whole chat, by transformers alone."""
        ids: list[int] = self.hugging_face.apply_chat_template(
            list(messages), add_generation_prompt=generation_prompt, return_dict=False
        )
        return ids


def wrap(tokenizer: Tokenizer, template: str | None, **special: str) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    wrapped.chat_template = template
    return wrapped


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GEMMA = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"]
NAMES = ["llama-3.1", "llama-3.2", "qwen2.5", "qwen3", "gemma-3", "smollm2"]


@cache
def model(name: str) -> Model:
    if name.startswith("llama"):
        wrapped = wrap(byte_level(LLAMA), template(name), bos_token=LLAMA[0], eos_token="<|eot_id|>")
        header = "<|start_header_id|>user<|end_header_id|>\n\n"
        return Model(name, wrapped, "<|eot_id|>", "", "<|end_of_text|>", header, knows_tool=True, trims=True)
    if name == "gemma-3":
        wrapped = wrap(sentence_pieces(GEMMA), template(name), bos_token="<bos>", eos_token="<end_of_turn>")
        header = "<start_of_turn>user\n"
        return Model(name, wrapped, "<end_of_turn>", "\n", "<eos>", header, knows_tool=False, trims=True)
    rust = byte_level(CHATML, normalizer=normalizers.NFC() if name.startswith("qwen") else None)
    if name == "qwen3":
        rust.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_response>", "</tool_response>")])
    wrapped = wrap(rust, template(name), eos_token="<|im_end|>")
    header = "<|im_start|>user\n"
    return Model(name, wrapped, "<|im_end|>", "\n", "<|endoftext|>", header, knows_tool=True, trims=False)
