"""Checks of a job on this machine before an engine is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from kuberoll_api import plugins
from kuberoll_api.model import traits
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.model.traits import Traits
from kuberoll_api.plugins import MissingPlugin
from kuberoll_workers.data.provenance import MODEL, TOKENIZER, hub_commit, model_source, tokenizer_sources
from kuberoll_workers.data.tokenization import TemplateRefused
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.data.tokenizer_files import model_directory, tokenizer_directory
from kuberoll_workers.data.tracebacks import with_frames
from kuberoll_workers.dataset.certificates import coverage
from kuberoll_workers.dataset.inputs import InputSummary, scan
from kuberoll_workers.dataset.reading import DatasetError
from kuberoll_workers.environments.registry import UnusableEnvironment
from kuberoll_workers.output.manifest import RunManifest
from kuberoll_workers.output.run_directory import pinned_revision
from kuberoll_workers.serving.engines.registry import engine_kind
from kuberoll_workers.worker.environments import (
    check_environment,
    isolated_environment_factory,
    players_of,
    remote_digests,
)
from kuberoll_workers.worker.settings import check_tools, job_tokenizer, observation_template

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")

MAX_PROCESSES = 256
"""Maximum number of worker processes that `kuberoll run` starts."""


class JobRefused(Exception):
    """The job cannot run on this machine; the message names the problem and its remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Directory or hub id of a model and of its tokenizer.

    Attributes:
        revision, tokenizer_revision: Commit of each at the hub; None: it is a directory, or its commit is unknown.
        sources: What they are, as in `RunManifest.sources`.
    """

    model: str
    tokenizer: str
    revision: str | None = None
    tokenizer_revision: str | None = None
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """Results of the checks.

    Attributes:
        notes: Settings that have no effect on this machine.
        services: Models of the job's services, in its order.
    """

    source: ModelSource
    inputs: InputSummary
    notes: tuple[str, ...]
    services: tuple[ModelSource, ...] = ()


def check(job: RolloutJob, *, base: Path, earlier: RunManifest | None = None) -> Preflight:
    """Check a job against this machine.

    Args:
        base: The manifest's directory, where its relative paths start.
        earlier: Manifest of the run to continue.

    Raises:
        JobRefused: A check failed; the message names the manifest's field.
    """
    # In the order of their time: code and data of the user come last.
    _check_processes(job)
    source = check_model(job, base=base, earlier=earlier)
    services = tuple(_check_services(job, base))
    _check_tracking(job)
    check_template(job, source)
    with_tools = _check_environments(job)
    try:
        inputs = scan(
            job,
            base=base,
            environment=isolated_environment_factory(job, protected=()),
            shards=job.spec.workers.shard_count,
        )
    except DatasetError as error:
        raise JobRefused(with_frames(error)) from error
    try:
        check_tools(job, source.tokenizer, with_tools or inputs.tools_at)
    except TemplateRefused as error:
        raise JobRefused(str(error)) from error
    notes = (*_notes(job), *_check_certificates(job, base))
    return Preflight(source=source, inputs=inputs, notes=notes, services=services)


def _check_certificates(job: RolloutJob, base: Path) -> Iterator[str]:
    """Notes on what the certificates of the job's rows say.

    Raises:
        JobRefused: The job requires them, and rows have none that is valid and good.
    """
    environment = isolated_environment_factory(job, protected=())
    try:
        found = coverage(job, base=base, environment=environment, remote=lambda: remote_digests(job))
    except (DatasetError, UnusableEnvironment) as error:
        raise JobRefused(with_frames(error)) from error
    if found is None:
        return
    if found.wrong and job.spec.dataset.certify.mode == "Require":
        raise JobRefused(found.refusal())
    yield f"certificates: {found}"
    yield from found.named


def check_model(
    job: RolloutJob, *, base: Path, earlier: RunManifest | None = None, generates: bool = True
) -> ModelSource:
    """Check that a job's engine is installed, and find its model and tokenizer.

    Args:
        base, earlier: As in `check`.
        generates: False if nothing will be generated here: then no engine is needed.

    Raises:
        JobRefused: One of them is missing; the message names the manifest's field.
    """
    if generates:
        _check_packages(job)
    model = job.spec.generation.model
    revision, tokenizer_revision = (pinned_revision(job, earlier, name) for name in (MODEL, TOKENIZER))
    source = _locate("spec.generation.model.source", model.source, base, ("config.json",), revision)
    given = model.tokenizer or model.source
    tokenizer = _locate("spec.generation.model.tokenizer", given, base, _TOKENIZER_FILES, tokenizer_revision)
    files = tokenizer_directory(tokenizer, tokenizer_revision)
    sources = {} if files is None else tokenizer_sources(files, own_template=model.chat_template is not None)
    own = files if tokenizer == source else model_directory(source, revision)
    if own is not None and job.spec.generation.external is None:
        sources[MODEL] = model_source(own)
    return ModelSource(
        model=source,
        tokenizer=tokenizer,
        revision=None if own is None else hub_commit(own),
        tokenizer_revision=None if files is None else hub_commit(files),
        sources=sources,
    )


def _check_services(job: RolloutJob, base: Path) -> Iterator[ModelSource]:
    for number, service in enumerate(job.spec.services):
        field = f"spec.services[{number}]"
        if (missing := engine_kind("VLLM").missing()) is not None:
            raise JobRefused(f"{field}: it is served by vLLM. {missing}")
        source, tokenizer = service.model.source, service.model.tokenizer or service.model.source
        yield ModelSource(
            model=_locate(f"{field}.model.source", source, base, ("config.json",)),
            tokenizer=_locate(f"{field}.model.tokenizer", tokenizer, base, _TOKENIZER_FILES),
        )


def _check_processes(job: RolloutJob) -> None:
    workers = job.spec.workers
    processes = min(workers.replicas, workers.shards or workers.replicas)
    if processes > MAX_PROCESSES:
        raise JobRefused(
            f"spec.workers.replicas: {processes} worker processes are too many for one machine, which runs at most "
            f"{MAX_PROCESSES}: use --set spec.workers.replicas=8 (and set spec.workers.shards "
            "to what it was, to continue a run)"
        )


def _check_packages(job: RolloutJob) -> None:
    try:
        players_of(job)
        if job.spec.generation.backend == "External":
            return
        missing = engine_kind(job.spec.generation.engine).missing()
    except MissingPlugin as error:
        raise JobRefused(str(error)) from error
    if missing is not None:
        raise JobRefused(f"spec.generation.engine: {missing}")


def _check_tracking(job: RolloutJob) -> None:
    if job.spec.output.tracking is None:
        return
    from kuberoll_workers.analysis.endings import EndingRefused

    try:
        plugins.load(plugins.ENDINGS, "tracking").check(job)
    except (EndingRefused, MissingPlugin) as error:
        raise JobRefused(str(error)) from error


def check_template(job: RolloutJob, source: ModelSource) -> None:
    """Check that chats and observations can be rendered as the job wants it.

    Raises:
        JobRefused: They cannot; the message names the manifest's field.
    """
    model = job.spec.generation.model
    own = model.chat_template is not None
    if job.spec.rollout.observation_template == "Raw" and not own and not model.chat_template_kwargs:
        return
    try:
        loaded = job_tokenizer(job, HuggingFaceTokenizer.load(source.tokenizer, revision=source.tokenizer_revision))
    except TemplateRefused as error:
        raise JobRefused(str(error)) from error
    try:
        observation_template(job, loaded)
    except TemplateRefused as error:
        field = "spec.generation.model.chatTemplate" if own else "spec.rollout.observationTemplate"
        raise JobRefused(f"{field}: {error}") from error


def _check_environments(job: RolloutJob) -> str | None:
    """Check that environments can be created; returns the first that declares tools."""
    with_tools = None
    for number, spec in enumerate(job.spec.environments):
        try:
            if check_environment(job, spec.name, protected=()).declares_tools and with_tools is None:
                with_tools = f"spec.environments[{number}] ({spec.name}) declares tools"
        except Exception as error:
            # The constructor is user code, which may raise anything.
            raise JobRefused(f"spec.environments[{number}] ({spec.name}): {with_frames(error)}") from error
    return with_tools


def _locate(field: str, source: str, base: Path, any_of: Sequence[str], revision: str | None = None) -> str:
    if "://" in source:
        raise JobRefused(f"{field}: {source}: on this machine use a directory or a hub id: --set {field}=...")
    path = Path(source).expanduser()
    path = path if path.is_absolute() else base / path
    if path.is_dir():
        if not any((path / name).is_file() for name in any_of):
            raise JobRefused(f"{field}: {path} has no {' or '.join(any_of)}: it is not a model's directory")
        return str(path.resolve())
    if path.exists():
        raise JobRefused(f"{field}: {path} is a file; name the model's directory")
    looks_like_path = source.startswith((".", "/", "~")) or source.count("/") > 1
    if looks_like_path:
        raise JobRefused(
            f"{field}: there is no directory {path} (relative paths start at the manifest); name another with "
            f"--set {field}=..."
        )
    return _on_hub(field, source, path, any_of, revision)


def _on_hub(field: str, source: str, path: Path, any_of: Sequence[str], revision: str | None) -> str:
    from huggingface_hub import hf_hub_download

    last: Exception | None = None
    for name in any_of:
        try:
            hf_hub_download(source, name, revision=revision)
        except Exception as error:
            # The hub's client raises many exception types with the same meaning here.
            last = error
        else:
            return source
    reason = str(last).strip().splitlines()[0] if last is not None and str(last).strip() else repr(last)
    raise JobRefused(
        f"{field}: {source!r} is neither a directory ({path} does not exist) nor a model that the hub gave: {reason}"
    )


def _notes(job: RolloutJob) -> Iterator[str]:
    """Notes on fields that are set and have an effect only in a cluster."""
    for path in _cluster_fields(job.spec, "spec", Traits()):
        yield f"{path} is for clusters and has no effect here"


def _cluster_fields(value: BaseModel, path: str, parent: Traits) -> Iterator[str]:
    for field in traits.fields(type(value), parent):
        if field.name not in value.model_fields_set:
            continue
        inner = getattr(value, field.name)
        if field.traits.place == "Cluster":
            yield f"{path}.{field.alias}"
        elif isinstance(inner, BaseModel):
            yield from _cluster_fields(inner, f"{path}.{field.alias}", field.traits)
