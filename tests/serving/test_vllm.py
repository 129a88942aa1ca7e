"""The real engine, vLLM on this machine's CPU."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.policy.interface import (
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
    SamplingParameters,
    StructuredOutputs,
)
from kuberoll_workers.serving.engines import spare_interpreter
from kuberoll_workers.serving.engines.interface import WeightsRefused
from kuberoll_workers.serving.engines.pulse import EngineStalled
from kuberoll_workers.serving.engines.self_check import TEXTS
from kuberoll_workers.serving.engines.spot_check import SpotChecks, response_of
from kuberoll_workers.serving.engines.vllm_engine import VLLMEngine
from kuberoll_workers.serving.engines.vllm_prober import VLLMProber, prove
from tests.policy.openai_serving import openai_client, serving_openai

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

TINY = str(Path(__file__).parents[2] / "examples" / "models" / "tiny-policy")
WINDOW = 512


@asynccontextmanager
async def running(model: str) -> AsyncIterator[VLLMEngine]:
    made = VLLMEngine(
        model=model,
        tokenizer=TINY,
        revision=None,
        engine_args={
            "dtype": "float32",
            "max_model_len": WINDOW,
            "kv_cache_memory_bytes": 1 << 27,
            # A policy that knows no JSON would fill its response with spaces.
            "structured_outputs_config": {"disable_any_whitespace": True},
        },
    )
    await made.start()
    try:
        yield made
    finally:
        await made.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VLLMEngine]:
    async with running(TINY) as made:
        yield made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model after a step of something like training."""
    path = tmp_path_factory.mktemp("weights") / "trained"
    shutil.copytree(TINY, path)
    draw = torch.Generator().manual_seed(1)
    tensors = load_file(path / "model.safetensors")
    for tensor in tensors.values():
        tensor += 0.3 * tensor.float().std() * torch.randn(tensor.shape, generator=draw)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(TINY)


PROMPT = [{"role": "user", "content": "The board is:\n1 _\n3 2\n"}]


def request(ids: Iterable[int], name: str = "r", **sampling: object) -> GenerationRequest:
    values: dict[str, Any] = {"max_tokens": 24, "seed": 1, **sampling}
    return GenerationRequest(
        request_id=name, session_id=name, token_ids=token_array(ids), sampling=SamplingParameters(**values)
    )


async def test_a_seed_reproduces_in_any_company(engine: VLLMEngine, tokenizer: HuggingFaceTokenizer) -> None:
    prompt = tokenizer.render_chat(PROMPT)
    alone = await engine.generate(request(prompt, temperature=2.0))
    crowd = await asyncio.gather(*(engine.generate(request(prompt, seed=n, temperature=2.0)) for n in range(16)))
    assert crowd[1].token_ids == alone.token_ids
    assert crowd[1].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert len({tuple(result.token_ids) for result in crowd}) > 4


async def test_stop_strings_belong_to_one_request(engine: VLLMEngine, tokenizer: HuggingFaceTokenizer) -> None:
    prompt = tokenizer.render_chat(PROMPT)
    # Hot, so that some response holds a space early on; the same seeds with and without stopping at it.
    free = await asyncio.gather(*(engine.generate(request(prompt, seed=n, temperature=2.0)) for n in range(8)))
    stopped = await asyncio.gather(
        *(engine.generate(request(prompt, seed=n, temperature=2.0, stop=("e",) if n % 2 else ())) for n in range(8))
    )
    for number, (without, with_stop) in enumerate(zip(free, stopped, strict=True)):
        if number % 2 == 0:
            assert with_stop.token_ids == without.token_ids
            continue
        assert without.token_ids[: len(with_stop.token_ids)] == with_stop.token_ids
        text = tokenizer.decode(with_stop.token_ids)
        if with_stop.finish_reason == "stop" and "e" in text:
            # Included, and nothing after the token that completed it.
            assert "e" not in tokenizer.decode(with_stop.token_ids[:-1])
        assert len(with_stop.logprobs) == len(with_stop.token_ids)


FORMS: dict[str, tuple[StructuredOutputs, Callable[[str], bool]]] = {
    "json": (
        StructuredOutputs(
            json={
                "type": "object",
                "properties": {"move": {"enum": ["up", "down"]}},
                "required": ["move"],
                "additionalProperties": False,
            }
        ),
        lambda text: json.loads(text)["move"] in ("up", "down"),
    ),
    "regex": (
        StructuredOutputs(regex="[0-9]{3}-[0-9]{2}"),
        lambda text: re.fullmatch("[0-9]{3}-[0-9]{2}", text) is not None,
    ),
    "choice": (StructuredOutputs(choice=["left", "right"]), lambda text: text in ("left", "right")),
    "grammar": (
        StructuredOutputs(grammar='root ::= "<" move ">"\nmove ::= "up" | "down"'),
        lambda text: text in ("<up>", "<down>"),
    ),
}


@pytest.mark.parametrize("form", FORMS)
async def test_responses_have_the_form_that_is_asked_for(
    form: str, engine: VLLMEngine, tokenizer: HuggingFaceTokenizer
) -> None:
    wanted, fits = FORMS[form]
    prompt = tokenizer.render_chat(PROMPT)
    free, *bound = await asyncio.gather(
        engine.generate(request(prompt, temperature=2.0)),
        *(
            engine.generate(
                request(prompt, name=str(seed), temperature=2.0, seed=seed, max_tokens=200, structured_outputs=wanted)
            )
            for seed in range(8)
        ),
    )
    texts = [tokenizer.decode(result.token_ids) for result in bound]
    assert [result.finish_reason for result in bound] == ["stop"] * 8
    assert all(fits(text) for text in texts), texts
    assert len(set(texts)) > 1
    assert tokenizer.decode(free.token_ids) not in texts
    # The log-probabilities are those among the tokens that the form allows.
    assert all(-20 < logprob <= 0 for result in bound for logprob in result.logprobs)


WRONG_FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(["}, "Failed to transform regex into a grammar"),
    ({"grammar": "root = 1"}, "Invalid grammar specification"),
    ({"json": {"type": "nonsense"}}, "nonsense"),
    # After a good grammar vLLM would try to compile it in its engine, and end the request with `error`.
    ({"grammar": 'root ::= "a"\nroot ::= "b"'}, "root"),
    # vLLM takes these, but no token satisfies them.
    ({"grammar": "root ::= root"}, "structured outputs"),
    ({"json": {"$ref": "#"}}, "structured outputs"),
    ({"regex": r"[^\s\S]"}, "structured outputs"),
    # Only by the other implementation, which the engine has not if another form was first.
    ({"json": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}, "backend: guidance"),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG_FORMS)
async def test_forms_that_nothing_can_have_are_refused_and_harm_nobody(
    wrong: dict[str, Any], says: str, engine: VLLMEngine, tokenizer: HuggingFaceTokenizer
) -> None:
    prompt = tokenizer.render_chat(PROMPT)
    before = await engine.generate(request(prompt, structured_outputs=StructuredOutputs(grammar='root ::= "a" | "b"')))
    with pytest.raises(PolicyRefused, match=re.escape(says)):
        await engine.generate(request(prompt, structured_outputs=StructuredOutputs(**wrong)))
    await engine.check_health()
    again = await engine.generate(request(prompt, structured_outputs=StructuredOutputs(grammar='root ::= "a" | "b"')))
    assert again.token_ids == before.token_ids


async def test_a_form_that_cannot_be_had_is_a_bad_request_of_vllm_s_api_too(engine: VLLMEngine) -> None:
    async with serving_openai(engine) as url, aiohttp.ClientSession() as session:
        for wrong, _ in WRONG_FORMS:
            body = {"model": TINY, "prompt": [1, 2], "max_tokens": 4, "structured_outputs": wrong}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 400, await answer.text()


async def test_a_check_of_the_engine_is_no_traffic(engine: VLLMEngine, tokenizer: HuggingFaceTokenizer) -> None:
    client = await engine.open_client()
    reports = [await prove(client, client, cpu=True, whole=number == 0) for number in range(4)]
    assert [report.words for report in reports] == [""] * 4
    assert max(pair.difference for report in reports for pair in report.pairs) < 1e-3
    assert max(report.evidence for report in reports) < 0.0
    prompt = tokenizer.encode(TEXTS[0]).tolist()
    drawn = await VLLMProber(client).sample(prompt, temperature=1.0, seed=1, tokens=80)
    # Whole blocks of the cache, none of which is for others.
    assert (await engine.generate(request([*prompt, *drawn.ids], max_tokens=1))).cached_tokens == 0
    checking = asyncio.ensure_future(prove(client, client, cpu=True, whole=True))
    loads = [engine.info() async for _ in turns_until(checking)]
    assert {(info.ongoing_requests, info.tokens_in_flight) for info in loads} == {(0, 0)}
    await checking


async def turns_until(work: asyncio.Future[Any]) -> AsyncIterator[None]:
    """A turn of the loop each, until work is done."""
    while not work.done():
        yield
        await asyncio.sleep(0)


async def test_responses_of_a_run_are_scored_once_more(
    engine: VLLMEngine, tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    spots = SpotChecks(longest=WINDOW - 1, share=0.5)
    monkeypatch.setattr(engine, "_spots", spots)
    prompts = [list(tokenizer.encode(text)) for text in TEXTS * 4]

    def of(number: int) -> GenerationRequest:
        # Every other one has log-probabilities that scores of prompts have not.
        settings = {"top_k": 5} if number % 2 else {"seed": number}
        return request(prompts[number], f"spot-{number}", temperature=1.0, max_tokens=24, **settings)

    results = await asyncio.gather(*(engine.generate(of(number)) for number in range(len(prompts))))
    while engine._spot_tasks:
        await asyncio.wait(engine._spot_tasks)
    assert spots.tally.responses == len(prompts)
    assert 2 <= spots.tally.checked <= len(prompts) // 2
    # It may be 0: how a batch rounds depends on what is in it.
    assert spots.tally.largest < 3e-4
    # One whose first log-probability is said to be another.
    said = [results[0].logprobs[0] + 5e-4, *results[0].logprobs[1:]]
    await engine._check(response_of(prompts[0], results[0].token_ids, said, results[0].policy_versions))
    assert 2e-4 < spots.tally.largest < 8e-4
    await engine.check_health()


async def test_stop_tokens_end_a_response_and_least_lengths_delay_its_end(
    engine: VLLMEngine, tokenizer: HuggingFaceTokenizer
) -> None:
    prompt = tokenizer.render_chat(PROMPT)
    free = (await engine.generate(request(prompt, temperature=2.0))).token_ids
    stop = free[5]
    cut = await engine.generate(request(prompt, temperature=2.0, stop_token_ids=(stop,)))
    assert cut.token_ids == free[: free.index(stop) + 1]
    assert cut.finish_reason == "stop"
    late = await engine.generate(request(prompt, temperature=2.0, stop_token_ids=(stop,), min_tokens=15))
    assert len(late.token_ids) >= 15
    assert stop not in late.token_ids[:15]
    # Where the window has room for fewer, it is full.
    rest = WINDOW - 4
    long = [prompt[index % len(prompt)] for index in range(rest)]
    full = await engine.generate(request(long, min_tokens=20))
    assert (len(full.token_ids), full.finish_reason) == (4, "length")


async def test_only_tokens_that_are_likely_enough(engine: VLLMEngine, tokenizer: HuggingFaceTokenizer) -> None:
    prompt = tokenizer.render_chat(PROMPT)
    most_likely = await engine.generate(request(prompt, temperature=0.0))
    hot = await engine.generate(request(prompt, temperature=2.0))
    only = await engine.generate(request(prompt, temperature=2.0, min_p=1.0))
    assert only.token_ids == most_likely.token_ids != hot.token_ids
    assert list(only.logprobs) == pytest.approx([0.0] * len(only.logprobs), abs=1e-5)


async def test_penalties_are_those_of_the_formulas(engine: VLLMEngine, tokenizer: HuggingFaceTokenizer) -> None:
    prompt = tokenizer.render_chat(PROMPT)
    repetition, presence, frequency = 1.5, 0.75, 0.5
    result = await engine.generate(
        request(
            prompt,
            max_tokens=40,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
        )
    )
    plain = await engine.generate(request(prompt, max_tokens=40))
    assert result.token_ids != plain.token_ids
    model = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    ids = [*prompt, *result.token_ids]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    expected = []
    for position in range(len(result.token_ids)):
        scores = logits[len(prompt) + position - 1].clone()
        seen = torch.tensor(sorted(set(ids[: len(prompt) + position])))
        scores[seen] = torch.where(scores[seen] > 0, scores[seen] / repetition, scores[seen] * repetition)
        generated = torch.tensor(ids[len(prompt) : len(prompt) + position], dtype=torch.long)
        counts = torch.bincount(generated, minlength=len(scores))
        scores -= frequency * counts + presence * (counts > 0)
        expected.append(float(torch.log_softmax(scores, 0)[result.token_ids[position]]))
    assert list(result.logprobs) == pytest.approx(expected, abs=1e-3)
    assert any(count > 1 for count in Counter(result.token_ids).values())


async def test_the_prefix_of_the_next_turn_is_cached(engine: VLLMEngine, tokenizer: HuggingFaceTokenizer) -> None:
    prompt = tokenizer.encode("0 1 2 3 4 5 6 7 8 9 " * 10)
    first = await engine.generate(request(prompt))
    second = await engine.generate(request([*prompt, *first.token_ids, 5, 6, 7]))
    assert second.cached_tokens >= len(prompt) // 32 * 32


async def test_the_window(engine: VLLMEngine) -> None:
    result = await engine.generate(request([5] * (WINDOW - 3), temperature=0.0))
    assert len(result.token_ids) <= 3
    result = await engine.generate(request([5] * WINDOW))
    assert (list(result.token_ids), result.finish_reason) == ([], "length")
    with pytest.raises(PolicyRefused, match=f"{WINDOW + 1} tokens, the engine's window {WINDOW}"):
        await engine.generate(request([5] * (WINDOW + 1)))


async def test_seeded_prompts_of_more_than_one_batch(engine: VLLMEngine) -> None:
    # Together more tokens than the scheduler takes in a step: in chunks, seeded prompts would kill this engine.
    prompts = [[5 + n % 7] * (WINDOW - 20) for n in range(24)]
    results = await asyncio.gather(*(engine.generate(request(ids, seed=n)) for n, ids in enumerate(prompts)))
    assert all(len(result.token_ids) == len(result.logprobs) > 0 for result in results)
    await engine.check_health()


async def test_room_for_tokens_is_known(engine: VLLMEngine) -> None:
    # 4 layers of 128 keys and 128 values, in blocks of 32 tokens.
    assert engine.info().kv_cache_tokens == (1 << 27) // (4 * 2 * 128 * 4)


async def test_impossible_requests_are_refused_and_harm_nobody(engine: VLLMEngine) -> None:
    with pytest.raises(PolicyRefused):
        await engine.generate(request([1, 99_999]))
    assert len((await engine.generate(request([1, 2], max_tokens=1))).token_ids) == 1


async def test_tokens_of_unfinished_requests_are_counted(engine: VLLMEngine) -> None:
    generation = asyncio.gather(
        *(engine.generate(request([5, 6, 7], name=str(n), seed=n, max_tokens=300, temperature=2.0)) for n in range(8))
    )
    counts = []
    while not generation.done():
        counts.append(engine.info().tokens_in_flight)
        await asyncio.sleep(0)
    generated = sum(len(result.token_ids) for result in await generation)
    assert 0 < max(counts) <= generated
    assert engine.info().tokens_in_flight == 0


async def test_a_cancelled_request_leaves_the_engine(engine: VLLMEngine) -> None:
    tasks = [
        asyncio.create_task(engine.generate(request([5, 6, 7], name=str(n), max_tokens=500, temperature=2.0)))
        for n in range(4)
    ]
    async with asyncio.timeout(240):
        while engine.info().ongoing_requests < len(tasks):  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while engine.info().ongoing_requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await engine.check_health()


async def test_vllm_s_own_api_around_it(engine: VLLMEngine, tokenizer: HuggingFaceTokenizer) -> None:
    chat: dict[str, Any] = {"model": "tiny", "messages": PROMPT, "extra_body": {"return_token_ids": True}}
    direct = await engine.generate(request(tokenizer.render_chat(PROMPT), temperature=0.0))
    async with serving_openai(engine) as url, openai_client(url) as client:
        answer = await client.chat.completions.create(
            **chat, temperature=0, max_tokens=24, logprobs=True, top_logprobs=3
        )
        (choice,) = answer.choices
        extra = choice.model_extra or {}
        assert extra["token_ids"] == direct.token_ids.tolist()
        assert extra["policy_versions"] == [list(span) for span in direct.policy_versions]
        assert choice.logprobs is not None
        sampled = choice.logprobs.content or []
        assert [item.logprob for item in sampled] == pytest.approx(direct.logprobs, abs=1e-4)
        assert all(len(item.top_logprobs) == 3 for item in sampled)
        stream = await client.chat.completions.create(**chat, temperature=0, max_tokens=24, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        streamed = [token for chunk in chunks for token in (chunk.model_extra or {}).get("token_ids") or []]
        assert streamed == direct.token_ids.tolist()
        assert "".join(chunk.delta.content or "" for chunk in chunks) == choice.message.content
        assert (chunks[-1].model_extra or {})["policy_versions"] == extra["policy_versions"]
        schema = {"name": "verdict", "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}},
                                                "required": ["ok"], "additionalProperties": False}}  # fmt: skip
        form: Any = {"type": "json_schema", "json_schema": schema}
        formed = await client.chat.completions.create(
            **chat, max_tokens=60, temperature=2, seed=1, response_format=form
        )
        assert set(json.loads(formed.choices[0].message.content or "")) == {"ok"}


async def test_what_a_session_captures_scores_as_it_was_sampled(engine: VLLMEngine) -> None:
    async with serving_openai(engine) as url, aiohttp.ClientSession() as http:
        async with http.post(f"{url}/sessions") as answer:
            session = await answer.json()
        async with openai_client(session["url"]) as client:
            chat: list[Any] = [*PROMPT]
            for turn in range(3):
                # The distribution that is sampled from is the model's own at temperature 1.
                answered = await client.chat.completions.create(
                    model="tiny", messages=chat, max_tokens=20, seed=turn, stream=False
                )
                said = {"role": "assistant", "content": answered.choices[0].message.content}
                chat += [said, {"role": "user", "content": "go on"}]
            again: list[Any] = [*PROMPT]
            await client.chat.completions.create(model="tiny", messages=again, max_tokens=20, seed=9)
        async with http.delete(session["url"]) as answer:
            closed = await answer.json()
    model = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    learned = 0
    for trajectory in closed["trajectories"]:
        ids = torch.tensor([[token for item in trajectory["messages"] for token in item["token_ids"]]])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0], dim=-1)
        start = 0
        for item in trajectory["messages"]:
            end = start + len(item["token_ids"])
            if item["role"] == "assistant":
                own = [float(scores[at - 1, ids[0, at]]) for at in range(start, end)]
                assert item["logprobs"] == pytest.approx(own, abs=1e-3)
                assert item["policy_versions"][-1][2] == end - start
                learned += item["learn"]
            start = end
    assert (closed["calls"], learned) == (4, 4)


async def test_new_weights_in_the_middle_of_a_response(
    engine: VLLMEngine, trained: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    prompt = tokenizer.encode("0 1 2 3 4 5 6 7 8 9 " * 10)
    before = await engine.generate(request(prompt, temperature=0.0))
    assert before.policy_versions == (("0", 0, len(before.token_ids)),)
    hot: dict[str, Any] = {"temperature": 2.0, "max_tokens": 300}
    under_way = [asyncio.create_task(engine.generate(request([5, 6, 7], seed=n, **hot))) for n in range(32)]
    # As many steps as this one takes, all have made by then, but those that ended by chance.
    await engine.generate(request([1, 2], max_tokens=4, temperature=2.0))
    await engine.load_weights(str(trained), "step-1")
    assert engine.info().policy_version == "step-1"

    async with running(str(trained)) as clean:
        expected = await clean.generate(request(prompt, temperature=0.0))
        # Cached when the weights were others, and continued from nothing of it.
        after = await engine.generate(request(prompt, temperature=0.0))
        assert after.token_ids == expected.token_ids
        assert after.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert after.logprobs != pytest.approx(before.logprobs, abs=1e-2)
        assert after.policy_versions == (("step-1", 0, len(after.token_ids)),)
        again = await engine.generate(request(prompt, temperature=0.0))
        assert again.cached_tokens > 0
        assert again.logprobs == pytest.approx(expected.logprobs, abs=1e-4)

        results = await asyncio.gather(*under_way)
        mixed = [result for result in results if len(result.policy_versions) == 2]
        for result in mixed:
            (old, start, change), (new, change_too, end) = result.policy_versions
            assert (old, new, start, end) == ("0", "step-1", 0, len(result.token_ids))
            assert 0 < change == change_too < end
        assert sum([await _first_new_token_is_true(clean, result) for result in mixed]) > 0

        await _breaks_and_says_so(clean, trained)

    await engine.load_weights(None, "0")
    restored = await engine.generate(request(prompt, temperature=0.0))
    assert restored.token_ids == before.token_ids
    assert restored.policy_versions == before.policy_versions


async def _first_new_token_is_true(clean: VLLMEngine, result: GenerationResult) -> bool:
    """Compare the first token after the change with what an engine that never had other weights says of it."""
    change = result.policy_versions[1][1]
    prompt = [5, 6, 7, *result.token_ids[:change]]
    drawn = await asyncio.gather(
        *(clean.generate(request(prompt, seed=n, temperature=2.0, max_tokens=1)) for n in range(64))
    )
    logprobs = {draw.token_ids[0]: draw.logprobs[0] for draw in drawn}
    if (token := result.token_ids[change]) not in logprobs:
        return False
    assert result.logprobs[change] == pytest.approx(logprobs[token], abs=1e-3)
    return True


async def _breaks_and_says_so(engine: VLLMEngine, trained: Path) -> None:
    strange = trained.parent / "strange"
    strange.mkdir()
    save_file({"no.such.tensor": torch.zeros(3)}, strange / "model.safetensors")
    hot: dict[str, Any] = {"temperature": 2.0, "max_tokens": 300}
    waiting = [asyncio.create_task(engine.generate(request([5, 6, 7], seed=n, **hot))) for n in range(32)]
    await engine.generate(request([1, 2], max_tokens=2))
    with pytest.raises(PolicyUnavailable, match="weights step-2 could not be loaded"):
        await engine.load_weights(str(strange), "step-2")
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert any(isinstance(end, PolicyUnavailable) for end in ends)
    with pytest.raises(PolicyUnavailable, match="step-2"):
        await engine.generate(request([1, 2]))
    with pytest.raises(PolicyUnavailable, match="step-2"):
        await engine.check_health()


async def test_weights_that_do_not_fit_change_nothing(engine: VLLMEngine, trained: Path, tmp_path: Path) -> None:
    before = await engine.generate(request([5, 6, 7], temperature=0.0))
    tensors = load_file(trained / "model.safetensors")
    name = sorted(tensors)[0]
    small, partial, torn, empty = (tmp_path / name for name in ("small", "partial", "torn", "empty"))
    for path in (small, partial, torn, empty):
        path.mkdir()
    save_file({**tensors, name: tensors[name][:1].clone()}, small / "model.safetensors")
    save_file({key: value for key, value in tensors.items() if key != name}, partial / "model.safetensors")
    (torn / "model.safetensors").write_bytes((trained / "model.safetensors").read_bytes()[:-100])
    for path, why in [
        (small, f"{name} has the shape"),
        (partial, f"{name} is missing"),
        (torn, "was it written completely"),
        (empty, "has no weights"),
        (tmp_path / "nowhere", "is not a directory"),
    ]:
        with pytest.raises(WeightsRefused, match=why):
            await engine.load_weights(str(path), "step-1")
    assert await engine.generate(request([5, 6, 7], temperature=0.0)) == dataclasses.replace(before)
    await engine.check_health()


def signal_core(number: int) -> None:
    """Send a signal to the process of the engine's core."""
    found = 0
    for child in psutil.Process(os.getpid()).children():
        # Others that this process has started may have ended meanwhile.
        with contextlib.suppress(psutil.Error):
            if "EngineCore" in " ".join(child.cmdline()) or "EngineCore" in child.name():
                child.send_signal(number)
                found += 1
    assert found == 1


@pytest.mark.parametrize("requests", [0, 4], ids=["idle", "busy"])
async def test_an_engine_whose_process_is_stopped_says_so_and_goes_on(
    engine: VLLMEngine, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._pulse, "_stall_seconds", 0.5)
    sampling = {"max_tokens": 400, "min_tokens": 400, "temperature": 2.0}
    asking = [
        asyncio.create_task(engine.generate(request([5, 6, 7], name=str(n), seed=n, **sampling)))
        for n in range(requests)
    ]
    async with asyncio.timeout(240):
        while engine.info().tokens_in_flight < requests:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
    signal_core(signal.SIGSTOP)
    try:
        with pytest.raises(EngineStalled, match="the engine has made no step for"):
            await _check_until_it_fails(engine)
    finally:
        signal_core(signal.SIGCONT)
    assert [len(result.token_ids) for result in await asyncio.gather(*asking)] == [400] * requests
    async with asyncio.timeout(240):
        while True:
            with contextlib.suppress(EngineStalled):
                await engine.check_health()
                return
            await asyncio.sleep(0.05)


async def test_a_dead_engine_says_so(engine: VLLMEngine) -> None:
    # The last test: nothing works after it.
    await engine.check_health()
    signal_core(signal.SIGKILL)
    with pytest.raises(PolicyUnavailable):
        await _check_until_it_fails(engine)
    with pytest.raises(PolicyUnavailable):
        await engine.generate(request([1, 2]))


async def _check_until_it_fails(engine: VLLMEngine) -> None:
    async with asyncio.timeout(240):
        while True:
            await engine.check_health()
            await asyncio.sleep(0.05)


class Replica:
    """An actor with an engine."""

    async def start(self) -> tuple[list[int], list[int | None]]:
        """Start the engine; return the ids of the spare interpreters, and of the engine's processes."""
        spares: list[int] = []

        class Recorded(spare_interpreter.SpareInterpreter):
            def __init__(self, modules: Sequence[str]) -> None:
                super().__init__(modules)
                spares.append(self.pid)

        vars(spare_interpreter)["SpareInterpreter"] = Recorded
        async with running(TINY) as engine:
            return spares, [process.pid for process in engine._processes]


async def test_in_an_actor_the_engine_s_process_has_imported_vllm_beforehand(ray: Any) -> None:
    replica = ray.remote(num_cpus=0)(Replica).remote()
    try:
        spares, processes = await replica.start.remote()
    finally:
        ray.kill(replica)
    assert spares == processes
    assert len(spares) == 1
