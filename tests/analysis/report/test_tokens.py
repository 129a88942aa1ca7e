"""Details of tokens in a report: log-probabilities, texts, and policy versions."""

from __future__ import annotations

import shutil
from array import array
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.analysis.report.make import own_texts, read_report
from kuberoll_workers.analysis.report.token_details import MOST_TOKENS, token_details
from kuberoll_workers.analysis.report.token_texts import TokenizerUnusable, TokenTexts, load_texts, stored_tokenizer
from kuberoll_workers.analysis.report.trajectory_sample import MESSAGE_CHARACTERS, readable
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.output.run_directory import MANIFEST, RunManifest
from kuberoll_workers.output.run_files import RunFiles
from tests.analysis.report.runs import WordTokenizer, report_of, store, trajectory

TINY = Path(__file__).parents[3] / "examples" / "models" / "tiny-policy"
TEXTS = st.text(max_size=60) | st.sampled_from(["héllo wörld 🙂🙂 日本語", "  two  spaces\n\n", "a", ""])


class Rust:
    """A tokenizer of the `tokenizers` package."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Any) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=True))


def byte_level() -> Rust:
    """Every byte a token, as GPT's and Qwen's tokenizers fall back to, with a few merges."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("Ġ", "w"), ("Ã", "©")]
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Rust(backend)


def sentence_piece() -> Rust:
    """Words begin with a sign for their space, which the decoder strips at the beginning of a text, like Llama 2's."""
    tokenizers = pytest.importorskip("tokenizers")
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"abcdefghijklmnopqrstuvwxyz",
        "▁",
        "▁a",
        "▁w",
        "lo",
    ]
    merges = [("▁", "a"), ("▁", "w"), ("l", "o")]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece: number for number, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True
        )
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return Rust(backend)


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@given(text=TEXTS)
def test_the_texts_of_the_tokens_are_the_response(make: Any, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    content = tokenizer.decode(ids)
    pieces = TokenTexts(tokenizer).pieces(ids, content)
    assert pieces is not None
    assert len(pieces) == len(ids)
    assert "".join(pieces) == content


def test_each_token_has_its_own_text() -> None:
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    end = tokenizer._backend.token_to_id("<|end|>")
    assert texts.pieces([*tokenizer.encode("he w"), end], "he w") == ["he", " w", ""]
    # A character of several tokens belongs to the one that completes it.
    smile = tokenizer.encode("a🙂b")
    assert texts.pieces(smile, "a🙂b") == ["a", "", "", "", "🙂", "b"]
    assert texts.pieces(tokenizer.encode("🙂")[:2], tokenizer.decode(tokenizer.encode("🙂")[:2])) is not None
    assert TokenTexts(sentence_piece()).pieces(sentence_piece().encode("a world"), "a world") is not None
    assert texts.pieces([], "") == []
    # Of another tokenizer.
    assert texts.pieces(tokenizer.encode("he"), "she") is None


@given(st.text(alphabet="↑↓ udlr<>action/\n", max_size=40))
def test_the_tokenizer_of_the_tiny_policy(text: str) -> None:
    tokenizer = HuggingFaceTokenizer.load(str(TINY))
    ids = tokenizer.encode(text)
    pieces = TokenTexts(tokenizer).pieces(ids, tokenizer.decode(ids))
    assert pieces is not None
    assert "".join(pieces) == tokenizer.decode(ids)


def reply(text: str, logprobs: list[float], ids: list[int], **fields: Any) -> Message:
    return Message("assistant", text, token_array(ids), array("f", logprobs), 1, **fields, sampled=True)


def test_log_probabilities_are_thousandths_of_two_digits() -> None:
    logprobs = [-0.0, -0.0123, -0.0996, -0.1234, -2.345, -17.89, 1e-6]
    found = token_details(reply("", logprobs, [1] * 7), None, room=100, whole=True)
    assert found == {"logprobs": [0, 12, 100, 120, 2300, 18000, 0], "ids": [1] * 7}


def test_texts_or_ids_and_versions() -> None:
    tokenizer = WordTokenizer()
    ids = [*tokenizer.encode("to 🙂 \x1bbe"), WordTokenizer.END]
    spans = [("3", 0, 2), ("4", 2, 4)]
    message = reply("to 🙂 \x1bbe", [-1.0] * 4, ids, policy_versions=spans)
    found = token_details(message, TokenTexts(tokenizer), room=100, whole=True)
    # In the characters of JavaScript, and of the text as it is displayed.
    assert found == {"versions": spans, "logprobs": [1000] * 4, "lengths": [2, 3, 4, 0]}
    assert token_details(message, None, room=100, whole=True)["ids"] == ids
    for less in ({"room": 3, "whole": True}, {"room": 100, "whole": False}):
        assert token_details(message, None, **less) == {"versions": spans}  # type: ignore[arg-type]
    message.logprobs = message.policy_versions = None
    assert token_details(message, None, room=100, whole=True) == {}


def test_tokens_of_a_trajectory_are_bounded() -> None:
    size = MOST_TOKENS // 3
    messages = [reply("x" * 10, [-1.0] * size, [1] * size) for _ in range(5)]
    messages.insert(0, Message("assistant", "an example", token_array([1, 2]), array("f", [-1.0, -1.0]), 0))
    shown = readable(trajectory(0, messages=messages))["messages"]
    assert [len(item.get("logprobs", ())) for item in shown] == [0, size, size, size, 0, 0]
    (long,) = readable(trajectory(0, messages=[reply("x" * (MESSAGE_CHARACTERS + 1), [-1.0], [1])]))["messages"]
    assert "logprobs" not in long


def test_a_run_s_own_tokenizer_is_used_where_it_is(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(str(TINY))
    ids = list(tokenizer.encode("up"))
    record = trajectory(0, messages=[reply("up", [-1.0] * len(ids), ids)])
    place = tmp_path / "run"
    store(place, [record])
    bare = read_report(RunFiles(str(place))).page
    for source in (str(TINY), "nobody/no-such-model", "s3://bucket/model"):
        identity = {"generation.model.source": source, "generation.model.tokenizer": None}
        manifest = RunManifest(format=1, job="j", created="", shards=1, identity=identity, inputs={}, versions={})
        (place / MANIFEST).write_bytes(orjson.dumps(manifest))
        assert (stored_tokenizer(source) is not None) == (source == str(TINY))
        assert read_report(RunFiles(str(place))).page != bare
    assert load_texts(str(TINY)).pieces(ids, "up") is not None
    with pytest.raises(TokenizerUnusable, match=r"--tokenizer /nowhere: no tokenizer could be loaded"):
        load_texts("/nowhere")


def test_a_run_s_own_tokenizer_is_of_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of the hub has one revision, and no branch that points to it."""
    stored, other = "a" * 40, "b" * 40
    shutil.copytree(TINY, tmp_path / "hub" / "models--me--tiny" / "snapshots" / stored)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "run"
    store(place, [trajectory(0)])
    known = {}
    for revision in (stored, other, None):
        identity = {"generation.model.source": "me/tiny", "generation.model.revision": revision}
        manifest = RunManifest(format=1, job="j", created="", shards=1, identity=identity, inputs={}, versions={})
        (place / MANIFEST).write_bytes(orjson.dumps(manifest))
        known[revision] = own_texts(RunFiles(str(place))) is not None
    assert known == {stored: True, other: False, None: False}


def test_versions_are_counted_by_token_and_trajectory() -> None:
    def of(task: int, *spans: tuple[str, int, int], environment: str = "puzzle") -> Any:
        answer = reply("x", [-1.0] * 10, [1] * 10, policy_versions=list(spans) or None)
        example = Message("assistant", "example", token_array([1, 2]), None, 0)
        return trajectory(task, messages=[example, answer], environment=environment)

    records = [of(0, ("10", 0, 10)), of(1, ("9", 0, 4), ("10", 4, 10)), of(2), of(3, ("9", 0, 10), environment="math")]
    numbers = report_of(records).numbers
    everything, (maths, puzzle) = numbers["all"]["versions"], [item["versions"] for item in numbers["environments"]]
    assert everything == {"versions": [("9", 14, 2), ("10", 16, 2)], "others": 0, "several": 1, "unknown": 10}
    assert maths == {"versions": [("9", 10, 1)], "others": 0, "several": 0, "unknown": 0}
    assert puzzle["versions"] == [("9", 4, 1), ("10", 16, 2)]
    many = report_of([of(task, (f"b-{task}", 0, 10)) for task in range(30)]).numbers["all"]["versions"]
    assert [name for name, _, _ in many["versions"]] == [f"b-{number}" for number in range(24)]
    assert many["others"] == 60
