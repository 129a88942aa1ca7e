"""A tokenizer that is read without transformers is the one that transformers loads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.integrations.mistral.tokenizer import MistralConverter
from transformers.models.auto import tokenization_auto

from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.data.tokenizer_files import CLASSES_OF_MODEL_TYPES, FileTokenizer, read_tokenizer
from tests.data.hub import serving_hub, variables
from tests.data.support import NAMES, byte_level, model, template, wrap

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-policy"
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Push 4 to the left."}],
    [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "é ☃ 👍🏽\n\n\n"}],
    [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"},
        {"role": "user", "content": "Why?"},
    ],
]
TEXTS = [
    "",
    " ",
    "hello",
    "\n\n a\tb",
    "<|im_end|><|eot_id|> <eos>",
    "naïve ☃ 👩‍👩‍👧 \x00 \u202e",
    "x" * 300,
    "1234567 + 89",
]
MODEL_TYPE = {"model_type": "llama"}


def saved(tokenizer: PreTrainedTokenizerFast, directory: Path, **config: Any) -> Path:
    """A model's directory: the tokenizer as transformers saves it, with these keys changed."""
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(MODEL_TYPE))
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


@cache
def tekken() -> PreTrainedTokenizerFast:
    """A real tokenizer of 131,072 tokens, which a package carries."""
    import mistral_common

    path = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    return wrap(MistralConverter(str(path)).converted(), None, bos_token="<s>", eos_token="</s>")


def same(found: FileTokenizer, directory: Path, *more: str) -> None:
    """Check ids, texts, added tokens and chats against transformers."""
    expected = AutoTokenizer.from_pretrained(directory)
    one, other = HuggingFaceTokenizer(found), HuggingFaceTokenizer(expected)
    assert one.vocabulary == other.vocabulary
    assert one.added_tokens() == other.added_tokens()
    assert dict(found.special_tokens_map) == expected.special_tokens_map
    assert found.chat_template == expected.chat_template
    special = [token.content for token in found.added_tokens_decoder.values()]
    for text in [*TEXTS, *more, " ".join(special), "a".join(special[:50])]:
        ids = expected.encode(text, add_special_tokens=False)
        assert list(one.encode(text)) == ids
        assert one.decode(ids) == other.decode(ids) == expected.decode(ids, skip_special_tokens=True)
        assert found.encode(text, add_special_tokens=True) == expected.encode(text)
        assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids)
    if expected.chat_template is not None:
        for chat in CHATS:
            assert list(one.render_chat(chat)) == list(other.render_chat(chat))
            for prompt in (False, True):
                assert one.chat_text(chat, generation_prompt=prompt) == other.chat_text(chat, generation_prompt=prompt)


def test_the_tiny_policy() -> None:
    found = read_tokenizer(TINY)
    assert found is not None
    same(found, TINY)


@pytest.mark.parametrize("name", NAMES)
def test_families(name: str, tmp_path: Path) -> None:
    found = read_tokenizer(saved(model(name).hugging_face, tmp_path))
    assert found is not None
    same(found, tmp_path)


@pytest.mark.slow
def test_a_large_vocabulary(tmp_path: Path) -> None:
    found = read_tokenizer(saved(tekken(), tmp_path))
    assert found is not None
    same(found, tmp_path, (Path(__file__).parents[2] / "README.md").read_text())


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[FileTokenizer, Any]:
    directory = saved(model("llama-3.1").hugging_face, tmp_path_factory.mktemp("llama"))
    found = read_tokenizer(directory)
    assert found is not None
    return found, AutoTokenizer.from_pretrained(directory)


@given(text=st.text(), content=st.text())
def test_any_text(both: tuple[FileTokenizer, Any], text: str, content: str) -> None:
    found, expected = both
    ids = found.encode(text, add_special_tokens=False)
    assert ids == expected.encode(text, add_special_tokens=False)
    assert found.decode(ids, skip_special_tokens=True) == expected.decode(ids, skip_special_tokens=True)
    chat = [{"role": "user", "content": content}]
    assert found.apply_chat_template(chat, tokenize=False) == expected.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": None},
        {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}},
        {"clean_up_tokenization_spaces": True},
        {"split_special_tokens": True},
        {"eos_token": "<|another end|>"},
        {"extra_special_tokens": ["<|one more|>"]},
        {"additional_special_tokens": ["<|one more|>"]},
        {"extra_special_tokens": {"image_token": "<|eot_id|>"}},
        {"image_token": "<|eot_id|>"},
        {"added_tokens_decoder": {"3": {"content": "d", "special": True}}},
        {"added_tokens_decoder": {}},
        {"added_tokens_decoder": None},
        {"added_tokens_decoder": [1]},
        {"eos_token": {"content": "<|eom_id|>"}},
        {"chat_template": [{"name": "default", "template": "x"}]},
        {"fix_mistral_regex": True},
        {"bos_token": 7},
    ],
    ids=str,
)
def test_what_transformers_might_change_is_left_to_it(config: dict[str, Any], tmp_path: Path) -> None:
    saved(model("llama-3.1").hugging_face, tmp_path, **config)
    if "chat_template" in config:
        (tmp_path / "chat_template.jinja").unlink()
    assert read_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": True, "add_eos_token": True},
        {"padding_side": "left", "truncation_side": "left", "model_max_length": 8, "max_length": 4},
        {"eos_token": {"__type": "AddedToken", "content": "<|eom_id|>", "lstrip": False, "normalized": False}},
        {"additional_special_tokens": ["<|eom_id|>"], "pad_token": "<|end_of_text|>", "unk_token": None},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
    ],
    ids=str,
)
def test_what_changes_nothing_is_read(config: dict[str, Any], tmp_path: Path) -> None:
    found = read_tokenizer(saved(model("llama-3.1").hugging_face, tmp_path, **config))
    assert found is not None
    same(found, tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "tokenizer.json").write_text("{}"),
        lambda path: (path / "tokenizer.json").write_text("{"),
        lambda path: (path / "tokenizer.json").unlink(),
        lambda path: (path / "config.json").unlink(),
        lambda path: (path / "config.json").write_text("[]"),
        lambda path: (path / "config.json").write_text('{"model_type": "mistral"}'),
        lambda path: (path / "added_tokens.json").write_text("{}"),
        lambda path: (path / "special_tokens_map.json").write_text("{}"),
    ],
)
def test_what_is_missing_or_damaged_is_transformers_to_explain(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    damage(saved(model("llama-3.1").hugging_face, tmp_path))
    assert read_tokenizer(tmp_path) is None


def test_classes_of_model_types_are_those_of_transformers() -> None:
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    overruled = {kind: names[kind] for kind in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS}
    mistral = {kind: name for kind, name in names.items() if name == "MistralCommonBackend"}
    assert overruled | mistral == CLASSES_OF_MODEL_TYPES


def qwen(directory: Path, *, model_type: str = "qwen3", **config: Any) -> Path:
    """A directory as Qwen's are: the class's name, a vocabulary and added tokens behind it."""
    trained = byte_level([])
    state = json.loads(trained.to_str())
    built = Qwen2Tokenizer(vocab=state["model"]["vocab"], merges=[tuple(pair) for pair in state["model"]["merges"]])
    built.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    built.add_tokens(["<tool_call>", "</tool_call>"])
    built.chat_template = template("qwen3")
    config = {"eos_token": "<|im_end|>", "unk_token": None, "bos_token": None, **config}
    saved(built, directory, **config)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "Qwen2TokenizerFast"])
def test_qwen(model_type: str, name: str, tmp_path: Path) -> None:
    found = read_tokenizer(qwen(tmp_path, model_type=model_type, tokenizer_class=name))
    assert found is not None
    same(found, tmp_path)


def test_special_tokens_that_qwen_s_files_do_not_name_are_the_class_s(tmp_path: Path) -> None:
    path = qwen(tmp_path) / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in config.items() if not key.endswith("_token")}))
    found = read_tokenizer(tmp_path)
    assert found is not None
    assert found.special_tokens_map["eos_token"] == "<|endoftext|>"
    same(found, tmp_path)


def test_an_added_token_may_be_in_qwen_s_vocabulary_too(tmp_path: Path) -> None:
    path = qwen(tmp_path) / "tokenizer.json"
    first = json.loads(path.read_text())["added_tokens"][0]
    change(path, "model", "vocab", first["content"], value=first["id"])
    found = read_tokenizer(tmp_path)
    assert found is not None
    same(found, tmp_path)


@pytest.mark.parametrize("listed", [{}, {"0": 1}, ["<|im_end|>"]])
def test_added_tokens_that_qwen_s_configuration_does_not_list_are_left_to_transformers(
    listed: Any, tmp_path: Path
) -> None:
    assert read_tokenizer(qwen(tmp_path, added_tokens_decoder=listed)) is None


def change(path: Path, *keys: str | int, value: Any) -> None:
    """Set a value in a JSON file."""
    document = json.loads(path.read_text())
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("normalizer",), None),
        (("normalizer",), {"type": "NFKC"}),
        (("pre_tokenizer",), {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}),
        (("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"), r"\p{N}{1,3}"),
        (("pre_tokenizer", "pretokenizers", 0, "invert"), True),
        (("pre_tokenizer", "pretokenizers", 1, "add_prefix_space"), True),
        (("decoder",), {"type": "Fuse"}),
        (("model", "byte_fallback"), True),
        (("model", "ignore_merges"), True),
        (("added_tokens", 0, "lstrip"), True),
    ],
    ids=str,
)
def test_a_file_that_qwen_s_class_would_change(keys: tuple[str | int, ...], value: Any, tmp_path: Path) -> None:
    change(qwen(tmp_path) / "tokenizer.json", *keys, value=value)
    assert read_tokenizer(tmp_path) is None


@pytest.mark.parametrize("model_type", ["deepseek_v3", "phi3", "nemotron"])
def test_a_class_that_transformers_overrules(model_type: str, tmp_path: Path) -> None:
    saved(model("llama-3.1").hugging_face, tmp_path, tokenizer_class="LlamaTokenizerFast")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    found = read_tokenizer(tmp_path)
    assert found is not None
    same(found, tmp_path)


def test_a_template_that_refuses_says_what_it_says(tmp_path: Path) -> None:
    tokenizer = wrap(
        model("llama-3.1").hugging_face.backend_tokenizer, "{{ raise_exception('no ' + messages[0].role) }}"
    )
    loaded = HuggingFaceTokenizer.load(str(saved(tokenizer, tmp_path)))
    with pytest.raises(Exception, match="no user"):
        loaded.render_chat(CHATS[0])


def test_no_template(tmp_path: Path) -> None:
    loaded = HuggingFaceTokenizer.load(
        str(saved(wrap(model("llama-3.1").hugging_face.backend_tokenizer, None), tmp_path))
    )
    with pytest.raises(ValueError, match="no chat template"):
        loaded.render_chat(CHATS[0])


@pytest.mark.slow
def test_neither_transformers_nor_pytorch_is_loaded() -> None:
    script = (
        "import sys\n"
        "from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer\n"
        f"tokenizer = HuggingFaceTokenizer.load({str(TINY)!r})\n"
        "tokenizer.render_chat([{'role': 'user', 'content': 'hello'}])\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_model_of_the_hub_needs_no_transformers_either(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer\n"
        "tokenizer = HuggingFaceTokenizer.load('me/tiny')\n"
        "print(tokenizer.render_chat([{'role': 'user', 'content': 'hello'}]).tolist())\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    with serving_hub(tmp_path / "model") as hub:
        environment = variables(hub, tmp_path / "home")
        expected = HuggingFaceTokenizer.load(str(TINY)).render_chat([{"role": "user", "content": "hello"}]).tolist()
        for offline in ("0", "1"):
            done = subprocess.run(
                [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60,
                env={**environment, "HF_HUB_OFFLINE": offline},
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines() == [str(expected), "[]"]
        assert "tokenizer.json" in hub.asked
        assert "model.safetensors" not in hub.asked
        # A report looks for it in the same place, without asking the hub.
        script = (
            "from kuberoll_workers.analysis.report.token_texts import stored_tokenizer\n"
            "print(stored_tokenizer('me/tiny') is not None, stored_tokenizer('me/other'), stored_tokenizer('s3://b/model'))"
        )
        asked = len(hub.asked)
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60, env=environment
        )
        assert done.stdout.split() == ["True", "None", "None"], done.stderr
        assert len(hub.asked) == asked
