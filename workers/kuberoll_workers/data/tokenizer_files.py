"""A tokenizer read from its files by `tokenizers` and Jinja alone, where that is what transformers would make of them.

transformers needs seconds and PyTorch to be imported, and decides by model type and class name what becomes of the
files. For most models that are saved today the decision is: `tokenizer.json` as it is. Those are read here; for all
others, and for whatever is not known here, `read_tokenizer` returns None. The rules are those of
`AutoTokenizer.from_pretrained` in transformers 5.16 to 5.19; `tests/data/test_tokenizer_files.py` compares the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import AddedToken, Tokenizer

_CLASSES: Final = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Classes that take `tokenizer.json` as it is."""

OVERRULED_MODEL_TYPES: Final = frozenset(
    {
        "hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp",
        "ministral", "ministral3", "mistral", "mistral3", "mixtral", "pixtral", "voxtral", "voxtral_realtime",
    }
)  # fmt: skip
"""Model types of which transformers uses another class than the files name."""

_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Keys of tokenizer_config.json that change neither ids nor text where a tokenizer.json is.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "add_bos_token", "add_eos_token", "backend", "is_local", "local_files_only", "max_length", "model_input_names",
        "model_max_length", "name_or_path", "padding_side", "stride", "tokenizer_class", "truncation_side",
        "truncation_strategy",
    }
)  # fmt: skip
_READ: Final = frozenset(
    {
        *_NAMED, "added_tokens_decoder", "additional_special_tokens", "chat_template", "clean_up_tokenization_spaces",
        "extra_special_tokens", "split_special_tokens",
    }
)  # fmt: skip
# Known to no Jinja but transformers'.
_GENERATION_TAG: Final = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
_FLAGS: Final = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


class _Unknown(Exception):
    """transformers might make something else of these files."""


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
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,  # noqa: ARG002 - ids or text, never more
    ) -> list[int] | str:
        """A chat as the model's template writes it: its ids, or its text.

        Raises:
            ValueError: There is no template.
            jinja2.TemplateError: The template refuses the messages; what else a template raises goes through.
        """
        text = self._template.render(
            messages=conversation,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens_map,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @cached_property
    def _template(self) -> Template:
        if self.chat_template is None:
            raise ValueError("the tokenizer has no chat template")
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        # As Hugging Face's documentation of chat templates promises their authors.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.chat_template)


def read_tokenizer(directory: Path) -> FileTokenizer | None:
    """Read a model's tokenizer from its directory.

    Returns:
        None: Files are missing or damaged, or transformers might make something else of them.
    """
    try:
        return _read(directory)
    except (_Unknown, OSError, ValueError):
        return None


def _read(directory: Path) -> FileTokenizer:
    if any((directory / name).exists() for name in ("added_tokens.json", "additional_chat_templates", "tekken.json")):
        raise _Unknown
    config = _object(directory / "tokenizer_config.json")
    if config.get("tokenizer_class") not in _CLASSES or not config.keys() <= _WITHOUT_EFFECT | _READ:
        raise _Unknown
    if config.get("clean_up_tokenization_spaces") or config.get("split_special_tokens"):
        raise _Unknown
    if (directory / "special_tokens_map.json").exists() and "added_tokens_decoder" not in config:
        raise _Unknown
    model_type = _object(directory / "config.json").get("model_type")
    if not model_type or model_type in OVERRULED_MODEL_TYPES:
        raise _Unknown
    backend = _backend(directory / "tokenizer.json")
    added = backend.get_added_tokens_decoder()
    _check_added_tokens(config, added)
    contents = {token.content for token in added.values()}
    named = {name: _content(config[name]) for name in _NAMED if config.get(name) is not None}
    extra = [*_contents(config, "extra_special_tokens"), *_contents(config, "additional_special_tokens")]
    # transformers adds special tokens that are not there.
    if not contents.issuperset([*named.values(), *extra]):
        raise _Unknown
    return FileTokenizer(backend, _chat_template(directory, config), named)


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
    """Refuse a configuration whose added tokens are not those of the tokenizer, flag by flag."""
    listed = config.get("added_tokens_decoder")
    if listed is None:
        return
    for index, token in listed.items():
        known = added.get(int(index))
        if known is None or any(getattr(known, flag) != token.get(flag) for flag in _FLAGS):
            raise _Unknown


def _content(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
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
    if template is not None and (not isinstance(template, str) or _GENERATION_TAG.search(template)):
        raise _Unknown
    return template


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
