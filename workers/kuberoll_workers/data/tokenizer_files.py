"""A tokenizer read from its files by `tokenizers` and Jinja alone, where that is what transformers would make of them.

transformers needs seconds and PyTorch to be imported, and decides by model type and class name what becomes of the
files. For many models the result is `tokenizer.json` as it is: where they name no class of their own, where
transformers overrules the class that they name, and for Qwen's class if the file has what that class would make.
Those are read here; for all others, and for whatever is not known here, `read_tokenizer` returns None. The rules are
those of `AutoTokenizer.from_pretrained` in transformers 5.16 to 5.19; `tests/data/test_tokenizer_files.py` compares
the two.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from kuberoll_workers.data.chat_template import compiled

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_log = logging.getLogger(__name__)

FILES: Final = (
    "added_tokens.json", "additional_chat_templates/*", "chat_template.jinja", "config.json", "special_tokens_map.json",
    "tekken.json", "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip
"""Patterns of all files that decide what is read, also by not being there."""

_FILE_CLASSES: Final = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Classes that take `tokenizer.json` as it is."""

_QWEN2: Final = "Qwen2Tokenizer"
"""The class of Qwen2 to Qwen3, which takes vocabulary, merges and added tokens, and has all other parts of its own."""
_QWEN2_DEFAULTS: Final = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_QWEN2_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CLASSES_OF_MODEL_TYPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "arctic", "camembertv2-base", "chameleon", "chatlm", "cohere_asr", "deepseek_ocr", "deepseek_ocr2",
            "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_vl", "deepseek_vl_hybrid",
            "deepseek_vl_v2", "ernie4_5", "ernie4_5_moe", "fuyu", "h2ovl_chat", "hyperclovax", "hyperclovax_vlm",
            "internlm2", "jamba", "janus", "llava", "llava_next", "minicpm3", "minicpmv", "minimax_m2", "modernbert",
            "modernbert-decoder", "molmo", "molmo2", "nemotron", "nvfp4", "opencua", "openvla", "paddleocr_vl", "phi3",
            "phi3_v", "phimoe", "smolvlm", "step3_vl", "step3p5", "vipllava",
        ),
        "TokenizersBackend",
    ),
    **dict.fromkeys(
        ("ministral", "ministral3", "mistral", "mistral3", "mixtral", "pixtral", "voxtral", "voxtral_realtime"),
        "MistralCommonBackend",
    ),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"), "Qwen3_5Tokenizer"),
    "hyperclovax_vision_v2": "GPT2Tokenizer",
    "qwen2": _QWEN2,
}  # fmt: skip
"""Model types of which transformers uses this class, whatever the files name."""

_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Keys of tokenizer_config.json that change neither ids nor text where a tokenizer.json is.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "add_bos_token", "add_eos_token", "backend", "errors", "is_local", "local_files_only", "max_length",
        "model_input_names",
        "model_max_length", "name_or_path", "padding_side", "stride", "tokenizer_class", "truncation_side",
        "truncation_strategy",
    }
)  # fmt: skip
_READ: Final = frozenset(
    {
        *_NAMED, "add_prefix_space", "added_tokens_decoder",
        "additional_special_tokens", "chat_template", "clean_up_tokenization_spaces",
        "extra_special_tokens", "split_special_tokens",
    }
)  # fmt: skip
_BPE_OPTIONS: Final = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges",
)  # fmt: skip
_FLAGS: Final = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


class _Unknown(Exception):
    """transformers might load these files differently."""


@dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer and its chat template: those members of transformers' fast tokenizers that KubeRoll uses.

    Attributes:
        backend_tokenizer: As `tokenizer.json` has it, neither padding nor truncating.
        chat_template: Jinja source; None where the model has none.
        special_tokens_map: Text of the named special tokens (`bos_token`, ...), the template's variables.
    """

    backend_tokenizer: Tokenizer
    chat_template: str | None
    special_tokens_map: Mapping[str, str]

    is_fast = True
    clean_up_tokenization_spaces = False

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens by id."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids."""
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,  # noqa: ARG002 - ids or text, never more
        **variables: Any,
    ) -> list[int] | str:
        """A chat as a template writes it: its ids, or its text.

        Args:
            chat_template: Jinja source; None: the model's own.

        Raises:
            ValueError: There is no template.
            jinja2.TemplateError: The template refuses the messages; what else a template raises goes through.
        """
        template = self.chat_template if chat_template is None else chat_template
        if template is None:
            raise ValueError("the tokenizer has no chat template")
        text = compiled(template).render(
            messages=conversation,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **variables},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def tokenizer_directory(source: str, revision: str | None = None, *, stored: bool = False) -> Path | None:
    """The directory with a tokenizer's files: the source itself, or where the hub's cache has them.

    Args:
        source: Directory or hub id.
        stored: Only look on this machine; otherwise files of a hub id are downloaded.

    Returns:
        None if there is no such directory, and the hub has no such model or does not answer.
    """
    return _directory(source, revision, FILES, stored=stored)


def model_directory(source: str, revision: str | None = None) -> Path | None:
    """The directory of a model's configuration: the source itself, or where the hub's cache has it.

    Returns:
        None if there is no such directory, and the hub has no such model or does not answer.
    """
    return _directory(source, revision, ("config.json", "generation_config.json"), stored=False)


def _directory(source: str, revision: str | None, files: Sequence[str], *, stored: bool) -> Path | None:
    if Path(source).is_dir():
        return Path(source)
    try:
        from huggingface_hub import snapshot_download

        # Into the cache that transformers uses, too.
        found = snapshot_download(source, revision=revision, allow_patterns=list(files), local_files_only=stored)
    except Exception:
        # Its many exceptions all mean the same here; transformers gives the reason in its own words.
        _log.debug("%s: no files of the hub", source, exc_info=True)
        return None
    return Path(found)


def read_tokenizer(directory: Path) -> FileTokenizer | None:
    """Read a model's tokenizer from its directory.

    Returns:
        None: Files are missing or damaged, or transformers might load them differently.
    """
    try:
        return _read(directory)
    except (_Unknown, OSError, ValueError):
        return None


def _read(directory: Path) -> FileTokenizer:
    if any((directory / name).exists() for name in ("added_tokens.json", "additional_chat_templates", "tekken.json")):
        raise _Unknown
    config = _object(directory / "tokenizer_config.json")
    if not config.keys() <= _WITHOUT_EFFECT | _READ:
        raise _Unknown
    if any(config.get(key) for key in ("add_prefix_space", "clean_up_tokenization_spaces", "split_special_tokens")):
        raise _Unknown
    if (directory / "special_tokens_map.json").exists() and "added_tokens_decoder" not in config:
        raise _Unknown
    kind = _class(config, _object(directory / "config.json"))
    backend = _backend(directory / "tokenizer.json")
    added = backend.get_added_tokens_decoder()
    _check_added_tokens(config, added)
    names = dict(_QWEN2_DEFAULTS) if kind == _QWEN2 else {}
    names |= {name: config[name] for name in _NAMED if name in config}
    named = {name: _content(token) for name, token in names.items() if token is not None}
    special = {*named.values(), *_contents(config, "extra_special_tokens")}
    special |= {*_contents(config, "additional_special_tokens")}
    # transformers adds special tokens that are not there.
    if not special <= {token.content for token in added.values()}:
        raise _Unknown
    if kind == _QWEN2:
        _check_qwen2(backend, special)
    return FileTokenizer(backend, _chat_template(directory, config), named)


def _class(config: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """The class that transformers uses: one of those that are known here."""
    named, model_type = config.get("tokenizer_class"), model.get("model_type")
    if not isinstance(named, str) or not isinstance(model_type, str) or not model_type:
        raise _Unknown
    kind = CLASSES_OF_MODEL_TYPES.get(model_type, named)
    if kind in _FILE_CLASSES:
        return kind
    if kind.removesuffix("Fast") == _QWEN2:
        return _QWEN2
    raise _Unknown


def _check_qwen2(backend: Tokenizer, special: Collection[str]) -> None:
    """Refuse a tokenizer that the class would build differently."""
    state = orjson.loads(backend.to_str())
    model, splits = state["model"], state["pre_tokenizer"]
    words = {"type": "Split", "pattern": {"Regex": _QWEN2_WORDS}, "behavior": "Isolated", "invert": False}
    pieces = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    if splits is not None:
        for part in splits.get("pretokenizers", ()):
            # Offsets are the post-processor's, which is the file's.
            part.pop("trim_offsets", None)
    alike = (
        state["normalizer"] == {"type": "NFC"}
        and splits == {"type": "Sequence", "pretokenizers": [words, pieces]}
        and (state["decoder"] or {}).get("type") == "ByteLevel"
        and model["type"] == "BPE"
        and not any(model.get(key) for key in _BPE_OPTIONS)
    )
    # Added tokens get the ids after the vocabulary's, in their order.
    vocabulary = model["vocab"] if alike else {}
    behind = [token["id"] for token in state["added_tokens"] if token["content"] not in vocabulary]
    if not alike or behind != list(range(len(vocabulary), len(vocabulary) + len(behind))):
        raise _Unknown
    # Special tokens are added once more, plainly.
    odd = ("lstrip", "normalized", "rstrip", "single_word")
    for token in state["added_tokens"]:
        if token["content"] in special and (not token["special"] or any(token[flag] for flag in odd)):
            raise _Unknown


def _object(path: Path) -> dict[str, Any]:
    value = orjson.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise _Unknown
    return value


def _backend(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    state = path.read_text(encoding="utf-8")
    try:
        backend: Tokenizer = Tokenizer.from_str(state)
    except Exception as error:
        # The package raises nothing narrower.
        raise _Unknown from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check_added_tokens(config: Mapping[str, Any], added: Mapping[int, AddedToken]) -> None:
    """Refuse a configuration that lists added tokens other than the tokenizer's, or with other flags."""
    if "added_tokens_decoder" not in config:
        return
    own = {str(index): {flag: getattr(token, flag) for flag in _FLAGS} for index, token in added.items()}
    if config["added_tokens_decoder"] != own:
        raise _Unknown


def _content(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) and token.get("__type") == "AddedToken" else token
    if not isinstance(content, str):
        raise _Unknown
    return content


def _contents(config: Mapping[str, Any], key: str) -> list[str]:
    tokens = config.get(key) or []
    if not isinstance(tokens, list):
        # Names of the model's own, which become variables of the template.
        raise _Unknown
    return [_content(token) for token in tokens]


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    template = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise _Unknown
    return template
