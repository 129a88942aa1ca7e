"""NeMo Gym's own model server over a policy of KubeRoll: the ids that it captures are those that were sampled."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.serving.engines.simulated import Simulated
from tests.adapters.libraries.foreign import Server, packages
from tests.adapters.libraries.test_nemo_gym import REQUIREMENTS
from tests.policy.openai_serving import serving_openai, tokenizer_with_ends

pytestmark = pytest.mark.processes

# As the template does not write it.
CALL = '<tool_call>{"arguments":  {"city": "Bern"}, "name": "get_weather"}</tool_call>'
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


async def test_what_nemo_gym_captures_is_what_was_read_and_sampled(tmp_path: Path) -> None:
    place = tokenizer_with_ends(tmp_path)
    tokenizer = HuggingFaceTokenizer.load(str(place))
    settings = SimulatedEngine.model_validate({"responses": [CALL]})
    engine = Simulated(model="none", tokenizer=str(place), settings=settings, engine_args={"max_model_len": 2048})
    await engine.start()
    nemo_gym = await asyncio.to_thread(packages, "nemo-gym-0.4.0", REQUIREMENTS)
    async with serving_openai(engine, tool_parser="hermes") as url, aiohttp.ClientSession() as session:
        server = await asyncio.to_thread(
            Server, "serve_nemo_gym_model.py", f"{url}/v1", path=nemo_gym, log=tmp_path / "log"
        )
        try:
            items: list[dict[str, Any]] = [{"role": "user", "content": "Will it rain?", "type": "message"}]
            known: list[int] = []
            for _ in range(3):
                body = {"input": items, "tools": [TOOL]}
                async with session.post(f"{server.url}/v1/responses", json=body) as answer:
                    assert answer.status == 200, (await answer.text(), (tmp_path / "log").read_text()[-3000:])
                    response = await answer.json()
                (call,) = response["output"]
                assert (call["type"], call["name"], json.loads(call["arguments"])) == (
                    "function_call",
                    "get_weather",
                    {"city": "Bern"},
                )
                prompt, sampled = call["prompt_token_ids"], list(map(int, call["generation_token_ids"]))
                assert sampled == tokenizer.encode(CALL).tolist()
                assert call["generation_log_probs"] == [0.0] * len(sampled)
                # One sequence of ids from the first turn to the last.
                assert prompt[: len(known)] == known
                known = prompt + sampled
                items += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "no"}]
        finally:
            server.close()
    await engine.shutdown()
