"""Agents of NeMo Gym with their resources servers, its model server and its head server, whose port is printed.

python serve_nemo_gym_agents.py http://127.0.0.1:8000/v1 KEY

They are the package's own, each at a port of its own, as `gym env start` runs them; here they share one process. Only
the cards of blackjack are drawn from the rollout's numbers instead of the machine's entropy, so that two collections
can be compared.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import socket
import sys
from types import SimpleNamespace
from typing import Any

from tests.adapters.libraries.serve_nemo_gym import class_in

AGENTS = {
    "blackjack_gymnasium_agent": ("gymnasium_agent", "blackjack"),
    "mcqa_simple_agent": ("simple_agent", "mcqa"),
    "example_single_tool_call_simple_agent": ("simple_agent", "example_single_tool_call"),
}
MODEL = "policy_model"
HEAD = "head_server"


def config_of(url: str, key: str, sockets: dict[str, socket.socket], *, tokens: bool) -> dict[str, Any]:
    """The global configuration, as the package's own files have it, with the addresses of all servers."""

    def server(name: str, **settings: Any) -> dict[str, Any]:
        host, port = sockets[name].getsockname()
        return {"host": host, "port": port, "entrypoint": "app.py", **settings}

    found: dict[str, Any] = {HEAD: server(HEAD)}
    for name, (kind, resources) in AGENTS.items():
        found[resources] = {"resources_servers": {resources: server(resources, domain="other")}}
        references = {
            "resources_server": {"type": "resources_servers", "name": resources},
            "model_server": {"type": "responses_api_models", "name": MODEL},
        }
        steps = {"max_steps": 5} if kind == "gymnasium_agent" else {}
        found[name] = {"responses_api_agents": {kind: server(name, **references, **steps)}}
    found[MODEL] = {
        "responses_api_models": {
            "vllm_model": server(
                MODEL,
                base_url=url,
                api_key=key,
                model="tiny",
                return_token_id_information=tokens,
                uses_reasoning_parser=False,
            )
        }
    }
    return found


def deal_by_rollout() -> None:
    """Give each hand of blackjack the cards of its task and rollout."""
    module: Any = importlib.import_module("resources_servers.blackjack.app")
    own = module.BlackjackEnv.reset

    async def reset(self: Any, metadata: dict[str, Any], session_id: str | None = None) -> Any:
        seed = f"{metadata['_ng_task_index']}-{metadata['_ng_rollout_index']}"
        module.random = SimpleNamespace(Random=lambda: random.Random(seed))
        # It draws before anything else runs.
        return await own(self, metadata, session_id)

    module.BlackjackEnv.reset = reset


def make(name: str, config: dict[str, Any]) -> Any:
    """The app of a server, as `run_webserver` makes it."""
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import HeadServer, ServerClient, SimpleServer
    from omegaconf import OmegaConf

    head = BaseServerConfig(host=config[HEAD]["host"], port=config[HEAD]["port"])
    if name == HEAD:
        return HeadServer(config=head).setup_webserver()
    ((kind, servers),) = config[name].items()
    ((implementation, settings),) = servers.items()
    found = class_in(f"{kind}.{implementation}.app", SimpleServer)
    made = found(
        config=found.model_fields["config"].annotation(name=name, **settings),
        server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create(config)),
    )
    app = made.setup_webserver()
    made.setup_liveness(app)
    made.setup_exception_middleware(app)
    return app


async def serve(url: str, key: str, *, tokens: bool) -> None:
    import uvicorn

    names = [HEAD, MODEL, *AGENTS, *(resources for _, resources in AGENTS.values())]
    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in names}
    config = config_of(url, key, sockets, tokens=tokens)
    # What a server of NeMo Gym's gets from the command that starts it.
    os.environ["NEMO_GYM_CONFIG_DICT"] = json.dumps(config)
    deal_by_rollout()
    servers = [uvicorn.Server(uvicorn.Config(make(name, config), log_level="warning")) for name in names]
    print(f"port {sockets[HEAD].getsockname()[1]}", flush=True)
    await asyncio.gather(*(server.serve(sockets=[sockets[name]]) for name, server in zip(names, servers, strict=True)))


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:3], tokens="--without-tokens" not in sys.argv))
