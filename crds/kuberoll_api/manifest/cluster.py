"""What a manifest lacks in a cluster, found without one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Final
from urllib.parse import urlsplit

from kuberoll_api.manifest.beside import FilesBeside, Finding, files_beside
from kuberoll_api.model.pods import PodOptions
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.output_claims import claim_problem, is_of_one_node, output_claim
from kuberoll_api.output_location import InvalidOutput, output_of
from kuberoll_api.paths import Path
from kuberoll_api.sandbox_images import unpullable

_MODEL: Final[Path] = ("spec", "generation", "model")
_IN_IMAGES: Final = "/opt/kuberoll/models/"
"""Directory of the models in KubeRoll's own images."""

_LOCAL_HOSTS: Final = ("localhost", "::1", "0.0.0.0")
_NOT_THIS_MACHINE: Final = "is this machine, but in a pod the pod itself; name an address that pods reach"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCheck:
    """Result of `check_for_cluster`.

    Attributes:
        problems: Reasons why no cluster can run the job as it is applied.
        notes: What the cluster or its images must have.
        beside: Files beside the manifest, for `kuberoll apply` to ship; none if the job names its files itself.
    """

    problems: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    beside: FilesBeside


def check_for_cluster(
    job: RolloutJob,
    base: FilePath,
    *,
    include: tuple[str, ...] = (),
    others: Sequence[Mapping[str, Any]] = (),
) -> ClusterCheck:
    """Check whether a job can be applied to a cluster, as far as its manifest and the files beside it tell.

    Args:
        base: The manifest's directory.
        include: Patterns of further files to ship.
        others: The manifest's objects of other APIs; a PersistentVolumeClaim among them says who can write to it.

    Raises:
        OSError: A file beside the manifest cannot be read.
    """
    beside = FilesBeside(files={})
    if job.spec.workers.files is None:
        beside = files_beside(job, base, include=include)
    claim = _claim_of(job, others)
    problems = [
        *(*_output_problems(job), *_claim_problems(job, claim), *_model_problems(job, base)),
        *(*_local_services(job), *_sandboxes(job), *beside.problems),
    ]
    notes = [
        *_missing_output(job),
        *_claim_notes(job, claim),
        *_mounted_models(job),
        *_missing_gpus(job),
        *_broker(job),
    ]
    notes += beside.notes
    return ClusterCheck(problems=tuple(problems), notes=tuple(notes), beside=beside)


def _sandboxes(job: RolloutJob) -> Iterator[Finding]:
    for number, environment in enumerate(job.spec.environments):
        if environment.sandbox is not None:
            for field, problem in unpullable(environment.sandbox):
                yield Finding(("spec", "environments", number, "sandbox", field), problem)


def _broker(job: RolloutJob) -> Iterator[Finding]:
    for number, environment in enumerate(job.spec.environments):
        if environment.sandbox is not None:
            yield Finding(
                ("spec", "environments", number, "sandbox"),
                "sandboxes are pods, for which the installation must have sandboxes.enabled: true in the values of its "
                "chart; pods pull images of tasks from registries",
            )
            return


def _output_problems(job: RolloutJob) -> Iterator[Finding]:
    if job.spec.output.uri is None:
        return
    try:
        output_of(job.spec.output.uri)
    except InvalidOutput as error:
        yield Finding(("spec", "output", "uri"), str(error).removeprefix("spec.output.uri: "))


def _claim_of(job: RolloutJob, others: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    name = output_claim(job.spec.output.uri)
    for item in others:
        metadata = item.get("metadata")
        if (
            item.get("kind") == "PersistentVolumeClaim"
            and isinstance(metadata, Mapping)
            and metadata.get("name") == name
        ):
            return item
    return None


def _claim_problems(job: RolloutJob, claim: Mapping[str, Any] | None) -> Iterator[Finding]:
    problem = claim_problem(job.spec.output.uri, job.spec.workers.replicas, claim)
    if problem is not None:
        yield Finding(("spec", "output", "uri"), problem.removeprefix("spec.output.uri: "))


def _claim_notes(job: RolloutJob, claim: Mapping[str, Any] | None) -> Iterator[Finding]:
    if job.spec.workers.replicas > 1 and is_of_one_node(claim):
        yield Finding(
            ("spec", "output", "uri"),
            f"the claim {output_claim(job.spec.output.uri)} is ReadWriteOnce, so that all {job.spec.workers.replicas} "
            "workers run on one node, which must have room for them; a ReadWriteMany claim or an object store spreads "
            "them",
        )


def _missing_output(job: RolloutJob) -> Iterator[Finding]:
    if job.spec.output.uri is None:
        yield Finding(
            ("spec", "output", "uri"),
            "absent: the job writes below the cluster's default (the chart's jobs.defaultOutput) and fails if there is "
            "none; s3://bucket/run or pvc://CLAIM/path needs no default",
        )


def _model_problems(job: RolloutJob, base: FilePath) -> Iterator[Finding]:
    generation = job.spec.generation
    for path, source in (*_model_sources(job), *_service_sources(job)):
        if _is_relative(source, base):
            # The engine's side reads object stores, the tokenizer's does not.
            where = "a hub id or a path in the pods" + ("" if path[-1] == "tokenizer" else ", or an s3:// or gs:// URI")
            yield Finding(path, f"{source} is a directory of this machine; name {where}")
    if "://" in generation.model.source and generation.model.tokenizer is None:
        yield Finding(
            (*_MODEL, "tokenizer"),
            "missing: workers load tokenizers from the hub or a directory, not from an object store; name one",
        )


def _model_sources(job: RolloutJob) -> Iterator[tuple[Path, str]]:
    generation = job.spec.generation
    yield (*_MODEL, "source"), generation.model.source
    if generation.model.tokenizer is not None:
        yield (*_MODEL, "tokenizer"), generation.model.tokenizer
    if job.spec.weights is not None:
        yield ("spec", "weights", "uri"), job.spec.weights.uri


def _service_sources(job: RolloutJob) -> Iterator[tuple[Path, str]]:
    for number, service in enumerate(job.spec.services):
        path: Path = ("spec", "services", number, "model")
        yield (*path, "source"), service.model.source
        if service.model.tokenizer is not None:
            yield (*path, "tokenizer"), service.model.tokenizer


def _is_relative(source: str, base: FilePath) -> bool:
    """True for a path that starts at the manifest or in a home directory; a hub id has at most one slash."""
    if "://" in source or source.startswith("/"):
        return False
    return source.startswith((".", "~")) or source.count("/") > 1 or (base / source).is_dir()


def _mounted_models(job: RolloutJob) -> Iterator[Finding]:
    places = [f"{path}/" for path in (*job.spec.generation.mount_paths, *job.spec.workers.mount_paths)]
    for path, source in _model_sources(job):
        if source.startswith("/") and not f"{source}/".startswith((_IN_IMAGES, *places)):
            yield Finding(
                path,
                f"{source} must exist in the pods: in their images, or on a volume that both generation and workers "
                "mount (by podTemplate of each)",
            )
    for path, source in _service_sources(job):
        _, _, number, *_ = path
        mounted = [f"{place}/" for place in job.spec.services[int(number)].mount_paths]
        if source.startswith("/") and not f"{source}/".startswith((_IN_IMAGES, *mounted)):
            yield Finding(
                path,
                f"{source} must exist in the service's pods: in their image, or on a volume that they mount (by "
                "podTemplate of the service)",
            )


def _missing_gpus(job: RolloutJob) -> Iterator[Finding]:
    generation = job.spec.generation
    for number, service in enumerate(job.spec.services):
        if service.gpus_per_replica is None and not _has_accelerators(service):
            yield Finding(
                ("spec", "services", number, "gpusPerReplica"),
                "absent, and no GPUs in resources.limits, so the service runs on CPUs, for which its image must be "
                "made (make images ENGINE=cpu)",
            )
    if generation.engine != "VLLM" or generation.backend == "External":
        return
    if not _has_accelerators(generation):
        yield Finding(
            ("spec", "generation", "resources"),
            "no GPUs in limits, so the engine runs on CPUs, for which the generation image must be made "
            '(make images ENGINE=cpu); for GPUs set limits: {nvidia.com/gpu: "1"}',
        )


def _has_accelerators(options: PodOptions) -> bool:
    limits = set(options.resources.limits)
    for container in options.main_containers:
        limits |= set((container.get("resources") or {}).get("limits") or ())
    # Extended resources have a domain: nvidia.com/gpu, amd.com/gpu.
    return any("/" in name for name in limits)


def _local_services(job: RolloutJob) -> Iterator[Finding]:
    external = job.spec.generation.external
    if external is not None:
        path: Path = ("spec", "generation", "external")
        urls = [((*path, "url"), external.url), *(((*path, "urls", n), url) for n, url in enumerate(external.urls))]
        for place, url in urls:
            if _is_this_machine(url):
                yield Finding(place, f"{url} {_NOT_THIS_MACHINE}")
    tracking = job.spec.output.tracking
    if tracking is not None and tracking.mlflow is not None:
        uri = tracking.mlflow.tracking_uri
        place = ("spec", "output", "tracking", "mlflow", "trackingUri")
        if uri.startswith(("sqlite:", "file:", "/", ".")):
            yield Finding(place, f"{uri} is a file, which is lost with the pod; name a server (https://...)")
        elif _is_this_machine(uri):
            yield Finding(place, f"{uri} {_NOT_THIS_MACHINE}")


def _is_this_machine(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in _LOCAL_HOSTS or host.startswith("127.")
