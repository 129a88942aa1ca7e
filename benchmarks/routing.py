"""Prefix-cache hit rate and balance of the ways to choose a replica: real vLLM on this machine's CPU, two replicas.

Trajectories of 8 turns, whose environment answers with 40 tokens after a random moment. The best possible hit rate is
computed: at every turn but the first, all full blocks of the turn before, its response included, whose last token is
the only one that has no keys and values yet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.transport import Ask
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, SamplingParameters
from kuberoll_workers.policy.routing.discovery import EndpointDiscovery
from kuberoll_workers.policy.routing.router import RoutedPolicy

MODEL = Path(__file__).parents[1] / "examples" / "models" / "tiny-policy"
BLOCK = 32
REPLICA_HEADER = "x-kuberoll-replica"


class Counting(ServeClient):
    """Counts the answers of each replica."""

    answers: ClassVar[Counter[str]] = Counter()

    async def _send(self, method: str, path: str, **options: Any) -> Any:
        answer = await super()._send(method, path, **options)
        if path == "/v1/generate":
            self.answers[answer.headers.get(REPLICA_HEADER, "?")] += 1
        return answer


@contextmanager
def host(routing: str) -> Iterator[str]:
    """A policy host with two replicas; its address."""
    scratch = Path(tempfile.mkdtemp(prefix="kr-", dir="/tmp"))
    engine_args = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 27, "block_size": BLOCK}
    app = {"model": str(MODEL), "tokenizer": str(MODEL), "engine": "VLLM", "engine_args": engine_args, "replicas": 2}
    (scratch / "config.json").write_text(json.dumps({"app": app, "scratch": str(scratch), "routing": routing}))
    with (scratch / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kuberoll_workers.serving.host", "--config", str(scratch / "config.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "failed":
                    raise RuntimeError(event["message"])
                if event["event"] == "ready":
                    yield event["url"]
                    break
        finally:
            process.stdin.close()
            process.wait()
            shutil.rmtree(scratch, ignore_errors=True)


async def play(number: int, ask: Ask, turns: int, draw: random.Random) -> tuple[int, int, int]:
    """Prompt tokens, those that were cached, and those that could have been."""
    context, computed = token_array(draw.choices(range(3, 60), k=48)), 0
    prompt = cached = possible = 0
    for turn in range(turns):
        # A prompt's last token is always computed anew.
        possible += min(computed, len(context) - 1) // BLOCK * BLOCK
        prompt += len(context)
        result: GenerationResult = await ask(
            GenerationRequest(
                request_id=f"{number}-0-0-{turn}-0",
                session_id=f"{number}-0-0",
                token_ids=context,
                sampling=SamplingParameters(max_tokens=12, seed=number * 100 + turn),
            )
        )
        cached += result.cached_tokens
        computed = len(context) + len(result.token_ids) - 1
        context = context + result.token_ids + token_array(draw.choices(range(3, 60), k=40))
        await asyncio.sleep(draw.uniform(0.0, 0.1))
    return prompt, cached, possible


async def workload(name: str, ask: Ask, policy: RoutedPolicy | None, sessions: int, turns: int, seed: int) -> None:
    Counting.answers.clear()
    places = asyncio.Semaphore(sessions // 2)

    async def one(number: int) -> tuple[int, int, int]:
        async with places:
            try:
                # Of its own prompt in every round, so that none finds what another has left.
                return await play(number, ask, turns, random.Random(f"{seed}-{number}"))
            finally:
                if policy is not None:
                    policy.end_session(f"{number}-0-0")

    counts = await asyncio.gather(*(one(number) for number in range(sessions)))
    prompt, cached, possible = (sum(column) for column in zip(*counts, strict=True))
    answers = Counting.answers.values()
    balance = max(answers) / (sum(answers) / 2)
    print(
        f"{name:36} hit rate {cached / prompt:6.1%} of {possible / prompt:6.1%} possible; "
        f"busiest replica {balance:5.2f} × its part",
        flush=True,
    )


async def compare(url: str, sessions: int, turns: int) -> None:
    async with Counting(url, limit=256) as asking:
        discovery = EndpointDiscovery(asking, url)
        while len(await discovery.addresses()) < 2:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.5)
        for number, (name, sticky) in enumerate((("Session", True), ("LeastLoaded", False))):
            async with RoutedPolicy(discovery, lambda direct: Counting(direct, limit=256), sticky=sticky) as policy:
                while policy.state().replicas.get("closed") != 2:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.05)
                await workload(name, policy.generate, policy, sessions, turns, number)
        await workload("HAProxy, hash of the session", asking.generate, None, sessions, turns, 7)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    given = parser.parse_args(arguments)
    with host("Session") as url:
        asyncio.run(compare(url, given.sessions, given.turns))


if __name__ == "__main__":
    main()
