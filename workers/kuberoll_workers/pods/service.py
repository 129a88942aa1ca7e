"""Pod of a service of a job, a further served model: vLLM's own OpenAI-compatible server.

    POD_IP=10.0.0.7 VLLM_API_KEY=... python -m kuberoll_workers.pods.service --config FILE --service NAME

FILE is a `contract.PodConfig`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from kuberoll_api.contract import SERVICE_PORT
from kuberoll_api.logs import log_to_stderr
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.model.services import ModelService
from kuberoll_workers.pods.exit_codes import exit_status
from kuberoll_workers.pods.files import ConfigRefused, clip, job_of, read_config, write_termination_message
from kuberoll_workers.serving import vllm_server
from kuberoll_workers.serving.cached_models import cached

_log = logging.getLogger(__name__)


def service_of(job: RolloutJob, name: str) -> ModelService:
    """The service of this name.

    Raises:
        ConfigRefused: The job has none, or its model is not where it should be mounted.
    """
    found = next((service for service in job.spec.services if service.name == name), None)
    if found is None:
        raise ConfigRefused(f"spec.services: there is no service {name!r}")
    for field in ("source", "tokenizer"):
        place = getattr(found.model, field)
        if place is not None and place.startswith("/") and not Path(place).exists():
            raise ConfigRefused(
                f"spec.services ({name}): model.{field}: there is no {place} in this pod: mount a volume there with "
                "podTemplate of the service"
            )
    return found


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="kuberoll_workers.pods.service", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a PodConfig")
    parser.add_argument("--service", required=True, help="name of the service")
    given = parser.parse_args()
    try:
        job = job_of(read_config(given.config))
        log_to_stderr(job=job.metadata.name)
        if not os.environ.get(vllm_server.KEY_VARIABLE):
            raise ConfigRefused(f"the variable {vllm_server.KEY_VARIABLE} is not set: the server needs its key")
        service = service_of(job, given.service)
        host = os.environ.get("POD_IP") or "0.0.0.0"
        files = service.model
        model = cached(files.source)
        tokenizer = None if files.tokenizer is None else cached(files.tokenizer, tokenizer=True)
        arguments = vllm_server.serve_arguments(service, host=host, port=SERVICE_PORT, model=model, tokenizer=tokenizer)
        vllm_server.run(arguments)
    except Exception as error:
        code, cause = exit_status(error)
        _log.exception("the service cannot run")
        write_termination_message(clip(cause).encode())
        sys.exit(code)


if __name__ == "__main__":
    main()
