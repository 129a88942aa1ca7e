"""What sessions record of the sampling of a call is what the engine's core was given, on every route of the API.

The parameters are read where vLLM's front end hands them to the engine's core, by an account of their fields that does
not use `data.sampling`: a field of vLLM's that is new, or whose effect is not recorded, fails here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kuberoll_workers.data.sampling import distribution_of
from kuberoll_workers.policy.interface import SamplingParameters
from kuberoll_workers.rollouts.settings import sampling_of
from tests.policy.openai_serving import serving_openai, tokenizer_with_ends
from tests.serving.test_openai_api import Scripted

vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

# They end a response, or are about what is returned of it, or where it is computed. `watermarking` only turns off what
# `engineArgs` turn on; `_bad_words_token_ids` are `bad_words` once more.
WITHOUT_EFFECT = {
    "n", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "logprobs", "prompt_logprobs",
    "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs", "detokenize",
    "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind",
    "stream_interval", "skip_clone", "output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids",
    "_watermarking_skipped", "skip_reading_prefix_cache", "repetition_detection", "routed_experts_prompt_start",
    "watermarking", "_bad_words_token_ids",
}  # fmt: skip
VALUES = {
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens",
}  # fmt: skip


def in_effect(params: Any) -> set[str]:
    """Names of the fields that shape what is sampled: those that are not as they are by default."""
    neutral: tuple[Any, ...] = (None, {}, [])
    return {
        name
        for name in type(params).__struct_fields__
        if name not in WITHOUT_EFFECT
        and (value := getattr(params, name)) not in neutral
        and value != getattr(vllm.SamplingParams(), name)
        and not (name == "top_k" and value <= 0)
    }


def check_recorded(recorded: Mapping[str, Any], params: Any) -> None:
    """Check that a record says of every field that shapes what is sampled that it did, and of no other one."""
    shaping = in_effect(params)
    assert {name: recorded[name] for name in recorded if name in VALUES} == {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        **{name: getattr(params, name) for name in shaping & VALUES if name != "top_k"},
    }
    assert ("structured_outputs" in recorded) == ("structured_outputs" in shaping)
    others = shaping - VALUES - {"structured_outputs"}
    assert set(recorded.get("constraints", ())) == others
    assert recorded.keys() <= VALUES | {"structured_outputs", "constraints"}


temperatures = st.sampled_from([0, 0.0, 1e-6, 0.005, 0.01, 0.5, 1, 1.0, 1.3])
shares = st.sampled_from([0.3, 1, 1.0])
counts = st.sampled_from([-1, 0, 1, 20])
penalties = st.sampled_from([-1.0, 0.0, 0.5])
repetitions = st.sampled_from([1.0, 1.2])
biases = st.sampled_from([{}, {"5": 3}, {"5": -100, "6": 1.5}])
arguments = st.sampled_from([None, {}, {"mine": 1}])
FORMS: list[dict[str, Any]] = [{"choice": ["up", "down"]}, {"regex": "u+"}, {"json_object": True}]
seeds = st.integers(0, 9)
# Of rows and of requests alike.
shared: dict[str, st.SearchStrategy[Any]] = {
    "top_k": counts,
    "min_p": st.sampled_from([0.0, 0.2]),
    "presence_penalty": penalties,
    "frequency_penalty": penalties,
    "repetition_penalty": repetitions,
    "min_tokens": st.sampled_from([0, 2]),
}


@given(
    given_=st.fixed_dictionaries(
        {},
        optional={
            "temperature": temperatures,
            "top_p": shares,
            **shared,
            "seed": seeds,
            "ignore_eos": st.booleans(),
            "stop": st.just(["x"]),
            "logit_bias": st.sampled_from([None, {}, {5: 3.0}]),
            "bad_words": st.sampled_from([None, [], ["up"]]),
            "allowed_token_ids": st.sampled_from([None, [5, 6]]),
            "thinking_token_budget": st.sampled_from([None, -1, 0, 9]),
            "extra_args": arguments,
        },
    ),
    form=st.sampled_from([None, *FORMS]),
)
def test_every_field_that_shapes_what_is_sampled_is_recorded(given_: dict[str, Any], form: Any) -> None:
    outputs = None if form is None else vllm.sampling_params.StructuredOutputsParams(**form)
    params = vllm.SamplingParams(**given_, structured_outputs=outputs)
    recorded = distribution_of(params)
    check_recorded(recorded, params)
    assert recorded.get("structured_outputs") == (None if form is None else next(iter(form)))


rows = st.fixed_dictionaries(
    {},
    optional={
        "temperature": temperatures.map(float),
        "top_p": shares.map(float),
        **shared,
        "greedy": st.booleans(),
        "structured_outputs": st.sampled_from(FORMS[:2]),
    },
)


@given(job=rows, row=rows)
def test_what_the_loop_records_is_what_its_engine_is_given(job: dict[str, Any], row: dict[str, Any]) -> None:
    from kuberoll_workers.serving.engines.vllm_engine import _sampling_params

    asked = sampling_of(sampling_of(SamplingParameters(max_tokens=9), job), row)
    params = _sampling_params(asked, 9)
    assert distribution_of(asked) == distribution_of(params)
    check_recorded(distribution_of(asked), params)


class Watched(Scripted):
    """Keeps the parameters of each request as the core gets it."""

    def __init__(self, tokenizer: Path) -> None:
        super().__init__(tokenizer=tokenizer, window=2048)
        self.sampled: list[Any] = []

    async def open_client(self) -> Any:
        client = await super().open_client()
        core: Any = client.engine_core
        send = core.add_request_async

        async def add(request: Any) -> None:
            self.sampled.append(request.sampling_params.clone())
            await send(request)

        core.add_request_async = add
        return client


def fields(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    common = {"temperature": temperatures, "top_p": shares, "top_k": counts, "stream": st.booleans()}
    return st.fixed_dictionaries({}, optional={**common, **optional})


ONE: Any = {"type": "function", "function": {"name": "look"}}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {}}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
more = {
    "min_p": st.sampled_from([0.0, 0.2]),
    "presence_penalty": penalties,
    "frequency_penalty": penalties,
    "repetition_penalty": repetitions,
    "logit_bias": biases,
    "vllm_xargs": arguments,
    "seed": seeds,
}
most = {
    **more,
    "min_tokens": st.sampled_from([0, 2]),
    "ignore_eos": st.booleans(),
    "bad_words": st.sampled_from([[], ["up"]]),
    "allowed_token_ids": st.sampled_from([[5, 6, 355]]),
    "structured_outputs": st.sampled_from(FORMS),
    "n": st.sampled_from([1, 2]),
}
ROUTES: dict[str, tuple[dict[str, Any], st.SearchStrategy[dict[str, Any]]]] = {
    "chat/completions": (
        CHAT,
        fields(
            **most,
            response_format=st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
            tools=st.just([{"type": "function", "function": LOOK}]),
            tool_choice=st.sampled_from(["auto", "none", "required", ONE]),
        ),
    ),
    "completions": ({"prompt": [5, 6], "max_tokens": 20}, fields(**most)),
    "responses": (
        {"input": "hi", "max_output_tokens": 20, "store": False},
        fields(
            **more,
            text=st.sampled_from([{"format": {"type": "text"}}, {"format": SCHEMA}]),
        ),
    ),
    "messages": (
        CHAT,
        fields(
            vllm_xargs=arguments,
            tools=st.just([{"name": "look", "input_schema": LOOK["parameters"]}]),
            tool_choice=st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "look"}]),
        ),
    ),
}  # fmt: skip
calls = st.sampled_from(sorted(ROUTES)).flatmap(lambda path: st.tuples(st.just(path), ROUTES[path][1]))


async def play(
    url: str, engine: Watched, http: aiohttp.ClientSession, own: SamplingParameters | None, made: Sequence[Any]
) -> list[str]:
    """Make calls in a session, and check what it has recorded of them; returns the paths that answered."""
    body = {} if own is None else {"sampling": msgspec.to_builtins(own)}
    async with http.post(f"{url}/sessions", json=body) as answer:
        assert answer.status == 201, await answer.text()
        session = await answer.json()
    engine.sampled.clear()
    answered = []
    for path, given_ in made:
        before = len(engine.sampled)
        request = {"model": "tiny", **ROUTES[path][0], **given_}
        headers = {"authorization": f"Bearer {session['token']}"}
        async with http.post(f"{session['openai_base_url']}/{path}", json=request, headers=headers) as answer:
            text = await answer.text()
        assert answer.status in (200, 400), text
        if answer.status == 400:
            # vLLM refuses some of these together.
            assert len(engine.sampled) == before, text
        answered += [path] if answer.status == 200 else []
    async with http.delete(session["url"]) as answer:
        closed = await answer.json()
    recorded = [
        message["sampling"] for path in closed["trajectories"] for message in path["messages"] if message.get("learn")
    ]
    # Each call is a path of its own, in their order.
    assert len(recorded) == len(engine.sampled)
    for one, params in zip(recorded, engine.sampled, strict=True):
        check_recorded(one, params)
    return answered


def test_what_a_session_records_of_a_call_is_what_the_core_was_given(tmp_path: Path) -> None:
    engine = Watched(tokenizer_with_ends(tmp_path))
    answered: set[str] = set()

    async def begin(ready: asyncio.Future[str], end: asyncio.Event) -> None:
        await engine.start()
        async with serving_openai(engine, tool_parser="hermes") as url:
            ready.set_result(url)
            await end.wait()
        await engine.shutdown()

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        ready, end = loop.create_future(), asyncio.Event()
        serving = loop.create_task(begin(ready, end))
        url = runner.run(asyncio.wait_for(ready, 120))

        @given(own=st.one_of(st.none(), rows), made=st.lists(calls, min_size=1, max_size=4))
        @settings(deadline=None, suppress_health_check=list(HealthCheck))
        def check(own: dict[str, Any] | None, made: list[tuple[str, dict[str, Any]]]) -> None:
            async def once() -> None:
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
                    default = None if own is None else sampling_of(SamplingParameters(max_tokens=9), own)
                    answered.update(await play(url, engine, http, default, made))

            runner.run(once())

        try:
            check()
        finally:
            end.set()
            runner.run(asyncio.wait_for(serving, 60))
    assert answered == set(ROUTES)
