"""A response is read once, by position: thoughts, text and calls come out as they were put in, cut off or not."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from kuberoll_workers.data.messages import THOUGHTS
from kuberoll_workers.data.thoughts import ThoughtsReader, answer_of, thoughts_end, unfinished
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.data.tool_calls import parse_tool_calls
from tests.data.support import byte_level, wrap
from tests.examples import examples

# What marks thoughts and calls in any family, and what JSON is made of.
MARKS = [
    "<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>", "<|channel>", "<channel|>",
    "<|channel|>", "final", "analysis", "<|message|>", "<|START_THINKING|>", "<|END_THINKING|>", "<tool_call>",
    "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=f>", "</function>", "<parameter=a>", "</parameter>",
    "<|tool_call>", "<tool_call|>", "<|action_end|>", "```", "\\boxed{4}", "<answer>4</answer>", "Answer: B", "#### 4",
    '"', "\\", "{", "}", "[", "]", ",", ":", '{"name": "g"}', "<|im_end|>", "\n", " ", "x", "é", "🦀",
]  # fmt: skip
PIECES = st.lists(st.sampled_from(MARKS), max_size=6).map("".join)


def without(text: str, *tags: str) -> str:
    for tag in tags:
        while tag in text:
            text = text.replace(tag, "")
    return text


# Thoughts end at the first closing tag, and a call begins with its tag: these say what they are wherever they stand. An
# opening tag counts where it begins a line.
THOUGHT = PIECES.map(lambda text: without(text, "</think>"))
SAID = PIECES.map(lambda text: f"So {without(text, '<tool_call>')}".replace("\n", "\n."))
CALLS = st.lists(st.tuples(st.sampled_from(["f", "g"]), st.dictionaries(PIECES, PIECES, max_size=2)), max_size=3)


def written(calls: list[tuple[str, dict[str, str]]], ascii_only: bool) -> list[str]:
    return [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': values}, ensure_ascii=ascii_only)}\n</tool_call>\n"
        for name, values in calls
    ]


def read(text: str, **known: Any) -> tuple[str, list[Any], int]:
    end = thoughts_end(text, **known)
    found = parse_tool_calls(text, thoughts=end, cut=known.get("cut", False))
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found.calls]
    assert (found.text or "").startswith(text[:end] if calls else "")
    return text[:end], calls, len(found.invalid)


@settings(max_examples=examples(300))
@given(THOUGHT | st.none(), st.booleans(), SAID, CALLS, st.booleans())
def test_a_reading_gives_back_what_was_put_in_and_no_cut_makes_more_of_it(
    thought: str | None, opened: bool, said: str, calls: list[Any], ascii_only: bool
) -> None:
    opened = opened and thought is not None
    thoughts = "" if thought is None else f"{'' if opened else '<think>'}{thought}</think>"
    parts = written(calls, ascii_only)
    text = f"{thoughts}{said}{''.join(parts)}"
    assert read(text, opened=opened) == (thoughts, calls, 0)
    starts = [len(thoughts) + len(said) + sum(map(len, parts[:number])) for number in range(len(parts))]
    ends = [start + len(part.rstrip()) for start, part in zip(starts, parts, strict=True)]
    for at in range(len(text)):
        before, found, _ = read(text[:at], opened=opened, cut=True)
        # Where thoughts were not known to end nothing is an answer, and never is anything in them.
        assert before == text[:at] or (before == thoughts and at >= len(thoughts))
        assert found == (calls[: sum(end <= at for end in ends)] if before == thoughts else [])


@pytest.mark.parametrize(
    ("text", "opened", "answer"),
    [
        ("4", False, "4"),
        ("<think>4", False, ""),
        ("4", True, ""),
        ("so 4</think>5", True, "5"),
        ("so 4</think>5", None, "5"),
        ("\n <think>\n4</think>\n5", False, "\n5"),
        ("Write </think> to end it: 5", False, "Write </think> to end it: 5"),
        ("Write `<think>` to begin: 5", False, "Write `<think>` to begin: 5"),
        ("Let me see.\n<think>\n4", False, ""),
        ("<think>3</think>Wait.\n<think>4", False, ""),
        ("<think>3</think>Wait.\n<think>4</think>5", False, "Wait.\n<think>4</think>5"),
        ("<think>3</think>Say <think> or </think>.", False, "Say <think> or </think>."),
        ('<tool_call>{"name": "f", "arguments": {"text": "</think>"}}', None,
         '<tool_call>{"name": "f", "arguments": {"text": "</think>"}}'),
    ],
)  # fmt: skip
def test_what_follows_thoughts_is_the_answer(text: str, opened: bool | None, answer: str) -> None:
    assert text[thoughts_end(text, opened=opened) :] == answer


def test_a_call_may_have_any_tag_in_its_arguments() -> None:
    for payload in (
        "strip the </think> tag",
        "echo </tool_call>",
        "<tool_call>",
        '</tool_call><tool_call>{"name": "g"}',
    ):
        call = json.dumps({"name": "f", "arguments": {"text": payload}})
        for text in (f"<tool_call>{call}</tool_call>", f"<tool_call>{call}", f"<think>a</think><tool_call>{call}"):
            _, calls, invalid = read(text, opened=False)
            assert (calls, invalid) == ([("f", {"text": payload})], 0)


def test_an_unreadable_call_does_not_make_calls_of_its_arguments() -> None:
    inner = '<tool_call>{"name": "rm"}</tool_call>'
    wrong = json.dumps({"name": "f", "arguments": [inner.replace('"', "'")]})
    assert read(f"<tool_call>{wrong}</tool_call>", opened=False)[1:] == ([], 1)
    assert read(f"<tool_call>{wrong} and</tool_call>", opened=False)[1:] == ([], 1)


@pytest.mark.parametrize("cut", [False, True])
def test_a_call_without_its_closing_tag_is_made_unless_the_response_was_cut_off(cut: bool) -> None:
    _, calls, invalid = read('<tool_call>{"name": "f"}', opened=False, cut=cut)
    assert (len(calls), invalid) == ((0, 1) if cut else (1, 0))


def tokenizer_of(special: list[str], added: list[str] = []) -> HuggingFaceTokenizer:  # noqa: B006
    made: Tokenizer = byte_level(special)
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    wrapped: PreTrainedTokenizerFast = wrap(made, None)
    return HuggingFaceTokenizer(wrapped)


# A family's special tokens, its added ones, the end of a prompt, and responses with what they answer.
FAMILIES: dict[str, tuple[list[str], list[str], list[tuple[str, bool]], list[tuple[str, bool, str]]]] = {
    "qwen3": (
        ["<|im_start|>", "<|im_end|>"], ["<think>", "</think>", "<tool_call>", "</tool_call>"],
        [("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
         ("<|im_start|>assistant\n<think>\n", True), ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False)],
        [("<think>\na</think>\n\n5<|im_end|>", False, "\n\n5"), ("a</think>5", True, "5"), ("a", True, "")],
    ),
    "deepseek-r1": (
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"], ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"],
        [("<｜User｜>hello<｜Assistant｜><think>\n", True), ("<｜User｜><think><｜Assistant｜>", False)],
        [("a\n</think>\n\n5<｜end▁of▁sentence｜>", True, "\n\n5")],
    ),
    "magistral": (
        ["[INST]", "[/INST]", "[THINK]", "[/THINK]", "</s>"], [],
        [("[INST]hello[/INST]", False), ("[INST][THINK][/INST]", False), ("[INST]hello[/INST][THINK]", True)],
        [("[THINK]a[/THINK]5</s>", False, "5"), ("[THINK]a 4", False, ""), ("a</think>4[/THINK]5", True, "5"),
         ("5", False, "5"), ("<think>5", False, "<think>5"), ("[THINK]a[/THINK]5[THINK]6", False, "")],
    ),
    "gemma-4": (
        ["<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"], [],
        [("<|turn>user\nhello<turn|>\n<|turn>model\n", False), ("<|turn>model\n<|channel>thought\n<channel|>", False)],
        [("<|channel>thought\na<channel|>5<turn|>", False, "5"), ("<|channel>thought\na 4", False, "")],
    ),
    "gpt-oss": (
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|constrain|>", "<|call|>"], [],
        [("<|start|>user<|message|>hello<|end|><|start|>assistant", False),
         ("<|start|>assistant<|channel|>analysis<|message|>", True),
         ("<|start|>assistant<|channel|>final<|message|>", False)],
        [("<|channel|>analysis<|message|>4<|end|><|start|>assistant<|channel|>final<|message|>5<|return|>", False, "5"),
         ("<|channel|>analysis<|message|>a 4<|end|>", False, ""), ("<|channel|>analysis<|message|>a 4", False, ""),
         ("a 4", True, ""), ("5", False, "5"),
         ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", False, "")],
    ),
    "llama-without-tokens-for-it": (
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], [],
        [("<|start_header_id|>assistant<|end_header_id|>\n\n<think>\n", True), ("<|eot_id|>", False)],
        [("<think>a</think>5", False, "5"), ("a 4", True, "")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_thoughts_of_a_family_are_found_in_its_tokens(family: str) -> None:
    special, added, prompts, responses = FAMILIES[family]
    tokenizer = tokenizer_of(special, added)
    reader = ThoughtsReader(tokenizer)
    for prompt, opened in prompts:
        assert reader.opened(tokenizer.encode(prompt)) is opened, prompt
        assert reader.opened(tokenizer.encode(prompt + "a b c")) is opened, prompt
    for response, opened, answer in responses:
        ids = tokenizer.encode(response)
        text = tokenizer.decode(ids)
        fields = reader.fields(ids, text, opened=opened, cut=False)
        assert answer_of({"content": text, **fields}) == answer, response
        # The text with special tokens is divided at the same place.
        end = reader.end_in_marked(response, opened=opened, cut=False)
        assert tokenizer.decode(tokenizer.encode(response[end:])) == answer, response


def test_thoughts_go_on_where_no_mark_begins_another_message() -> None:
    tokenizer = tokenizer_of(["<|eot|>"], ["<think>", "</think>"])
    reader = ThoughtsReader(tokenizer)
    text = "so <act>up</act>"
    fields = reader.fields(tokenizer.encode(text), text, opened=True, cut=False)
    message = {"content": text, **fields}
    assert fields == {THOUGHTS: len(text)}
    assert unfinished(message)
    assert not unfinished({"content": "a</think>", THOUGHTS: 9})
    assert not unfinished({"content": "a"})
    for observation, opened in (("\nYou went up.\n", True), ("<|eot|>assistant\n", False), ("</think>\n", False)):
        assert reader.opened(tokenizer.encode(text + observation), before=True) is opened
    assert not reader.opened(tokenizer.encode(f"{text}\nYou went up.\n"), before=False)
    assert not reader.opened(array("i"))


def test_other_loops_say_nothing_of_thoughts() -> None:
    assert answer_of({"role": "assistant", "content": "a</think>5"}) == "5"
    assert answer_of({"role": "assistant", "content": "<think>a"}) == ""
    assert answer_of({"role": "assistant"}) == ""
