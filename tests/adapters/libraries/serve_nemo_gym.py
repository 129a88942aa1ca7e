"""A resources server of NeMo Gym, without the command that starts it together with Ray and a head server.

python serve_nemo_gym.py mcqa
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from typing import Any


def class_of(name: str) -> Any:
    """The class of one of the package's servers."""
    from nemo_gym.base_resources_server import SimpleResourcesServer

    return class_in(f"resources_servers.{name}.app", SimpleResourcesServer)


def class_in(name: str, base: type) -> Any:
    """The only class of this base that a module defines."""
    module = importlib.import_module(name)
    (found,) = (
        item
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, base) and item.__module__ == module.__name__
    )
    return found


def make(found: Any, name: str) -> Any:
    """The server's app, as `run_webserver` makes it."""
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import ServerClient
    from omegaconf import OmegaConf

    config = found.model_fields["config"].annotation
    head = BaseServerConfig(host="127.0.0.1", port=1)
    server = found(
        config=config(host="127.0.0.1", port=1, entrypoint="app.py", name=name, domain="other"),
        server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({})),
    )
    app = server.setup_webserver()
    server.setup_liveness(app)
    server.setup_exception_middleware(app)
    return app


def serve(app: Any) -> None:
    """Serve an app at a free port, or the one that a variable names; it is printed."""
    import uvicorn

    from tests.adapters.libraries.foreign import PORT_VARIABLE

    listening = socket.create_server(("127.0.0.1", int(os.environ.get(PORT_VARIABLE, "0"))))
    config = uvicorn.Config(app, log_level="warning")
    print(f"port {listening.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    serve(make(class_of(sys.argv[1]), sys.argv[1]))
