"""A generation pod without Ray: the simulated engine behind the same wire format, started in a second.

python -m tests.cluster.engine_pod --config FILE
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
from pathlib import Path

from aiohttp import web

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.policy import wire
from kuberoll_workers.serving.engines.simulated import Simulated

PORTS = (8000, 8080)


async def serve(job: RolloutJob, address: str) -> None:
    """Answers until SIGTERM."""
    generation = job.spec.generation
    assert generation.simulated is not None
    engine = Simulated(
        model=generation.model.source,
        tokenizer=generation.model.tokenizer or generation.model.source,
        settings=generation.simulated,
        engine_args={"max_model_len": 512, **generation.engine_args},
    )
    await engine.start()

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def info(_: web.Request) -> web.Response:
        return web.json_response(dataclasses.asdict(engine.info()))

    count = 0

    async def asked_so_far(_: web.Request) -> web.Response:
        return web.Response(text=str(count))

    async def generate(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        asked = wire.decode_request(await request.read(), wire.MSGPACK)
        result = await engine.generate(asked)
        return web.Response(body=wire.encode_result(result, wire.MSGPACK), content_type=wire.MSGPACK)

    app = web.Application(client_max_size=64 << 20)
    for path in ("/-/healthz", "/healthz", "/livez"):
        app.router.add_get(path, health)
    app.router.add_get("/info", info)
    app.router.add_get("/asked", asked_so_far)
    app.router.add_post("/v1/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    for port in PORTS:
        await web.TCPSite(runner, address, port).start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = json.loads(parser.parse_args().config.read_text())
    asyncio.run(serve(RolloutJob.model_validate(config["job"]), os.environ["POD_IP"]))


if __name__ == "__main__":
    main()
