"""Further served models of a job, which its environments ask: judges and reward models."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Final, Self

from pydantic import Field, model_validator

from kuberoll_api.model.contradictions import contradiction
from kuberoll_api.model.generation import ModelFiles
from kuberoll_api.model.pods import PodOptions
from kuberoll_api.model.traits import IDENTITY, POD
from kuberoll_api.model.types import DnsLabel, JsonObject

GPU: Final = "nvidia.com/gpu"

MAX_SERVICES: Final = 16

# Arguments of `vllm serve` that a service's address, its key and its model follow from.
_OURS: Final = ("api_key", "host", "model", "port", "revision", "root_path", "ssl_certfile", "ssl_keyfile", "tokenizer")
_PARALLEL: Final = ("tensor_parallel_size", "pipeline_parallel_size")


class ModelService(PodOptions):
    """A further served model: vLLM's own OpenAI-compatible server, beside the policy."""

    container_name: ClassVar[str] = "service"

    name: Annotated[DnsLabel, IDENTITY] = Field(
        description="Name of the service, by which environments refer to it (config.service, access.services)."
    )
    model: Annotated[ModelFiles, IDENTITY] = Field(description="The model that is served.")
    engine_args: Annotated[JsonObject, IDENTITY] = Field(
        default_factory=dict,
        description="Arguments of `vllm serve`, with underscores (runner: pooling, max_model_len: 8192, ...).",
    )
    replicas: Annotated[int, POD] = Field(
        default=1, ge=1, le=1024, description="Number of servers; `kuberoll run` starts one."
    )
    gpus_per_replica: Annotated[int | None, POD] = Field(
        default=None,
        ge=1,
        le=1024,
        description="GPUs of one server: its limit of nvidia.com/gpu. Absent: those of resources.limits.",
    )

    @property
    def gpus(self) -> int | None:
        """GPUs of one server; None if the fields of pods do not say it in whole numbers."""
        given = str(self.resources.limits.get(GPU, "0"))
        return self.gpus_per_replica or (int(given) if given.isdecimal() else None)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in self.engine_args:
            if name.replace("-", "_") in _OURS:
                raise contradiction(
                    "is not for engineArgs: model, and the address and the key that environments get, determine it",
                    *("engineArgs", name),
                )
        limit = self.resources.limits.get(GPU)
        if self.gpus_per_replica is not None and limit is not None and str(limit) != str(self.gpus_per_replica):
            raise contradiction(
                f"found {self.gpus_per_replica}, and resources.limits has {GPU}: {limit}; remove one of the two",
                "gpusPerReplica",
            )
        sizes = [size for name in _PARALLEL if isinstance(size := self.engine_args.get(name), int)]
        if self.gpus is not None and 0 < self.gpus < (world := math.prod(sizes)):
            raise contradiction(
                f"the model is spread over {world} GPUs ({' x '.join(_PARALLEL)}), and a server has {self.gpus}; "
                f"set gpusPerReplica to {world}",
                "engineArgs",
            )
        return self
