"""`kuberoll render`: prints the objects that the operator would create, without a cluster."""

from __future__ import annotations

import io
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kuberoll_api import contract
from kuberoll_api.manifest.loading import ManifestError, load_jobs

if TYPE_CHECKING:
    from kuberoll_api.model.rolloutjob import RolloutJob
    from kuberoll_operator.model import Object
    from kuberoll_operator.settings import Settings

UID: Final = "00000000-0000-0000-0000-000000000000"
"""Placeholder of the RolloutJob's uid, which only a cluster assigns."""


TOKEN: Final = "made by the operator from its key and the RolloutJob's uid"
"""Placeholder of the policy's tokens."""


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option("--namespace", "-n", help="Namespace of the job.  [default: the manifest's, else default]")
@click.option("--set", "overrides", metavar="PATH=VALUE", multiple=True, help="Change a field; repeatable.")
def render(manifest: Path, namespace: str | None, overrides: tuple[str, ...]) -> None:
    """Print the Kubernetes objects that the operator creates for the RolloutJobs of MANIFEST.

    Those of a job are sorted by their time of creation, which a comment describes. Settings of the operator that
    they depend on are read from the variables of its Deployment: KUBEROLL_GENERATION_IMAGE, KUBEROLL_WORKER_IMAGE,
    KUBEROLL_DEFAULT_OUTPUT and others. The exit code is 2 if a cluster would reject the job.
    """
    from kuberoll_operator.settings import InvalidSettings, Settings

    try:
        settings = Settings.from_environment(os.environ)
        jobs = load_jobs(manifest, overrides)
    except (ManifestError, InvalidSettings) as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    texts = []
    for job in jobs:
        try:
            texts.append(render_text(job, namespace or job.metadata.namespace or "default", settings))
        except ValueError as error:
            click.echo(f"{manifest}: {job.metadata.name}: {error}", err=True)
            sys.exit(2)
    click.echo("".join(texts), nl=False)


def render_text(job: RolloutJob, namespace: str, settings: Settings) -> str:
    """Children of a job as YAML documents.

    Raises:
        ValueError: The job cannot run in a cluster; the message names the cause and the remedy.
    """
    return "".join(f"---\n# {when}\n{to_yaml(child)}" for when, child in children_of(job, namespace, settings))


def children_of(job: RolloutJob, namespace: str, settings: Settings) -> list[tuple[str, Object]]:
    """All children of a job in the order of their creation, each with a description of when that is.

    Raises:
        ValueError: The job cannot run in a cluster; the message names the cause and the remedy.
    """
    from kuberoll_operator import render as built
    from kuberoll_operator.backends import BACKENDS, backend_of
    from kuberoll_operator.defaults import with_defaults
    from kuberoll_operator.facts import spec_problem
    from kuberoll_operator.model import Observed
    from kuberoll_operator.queueing import priority_class_of, queue_of

    job = with_defaults(job, {"metadata": {"namespace": namespace}}, settings)
    name = backend_of(job, {}, kuberay=settings.kuberay)
    if (problem := spec_problem(job, name, settings)) is not None:
        raise ValueError(problem)
    backend = BACKENDS[name]
    context = built.RenderContext(
        job=job,
        namespace=namespace,
        uid=UID,
        settings=settings,
        hosting=backend.hosting(job, namespace, settings),
        shards=job.spec.workers.shard_count,
        tokens=dict.fromkeys(contract.SCOPES, TOKEN),
        environment_tokens={spec.name: TOKEN for spec in job.spec.environments},
        service_tokens={service.name: TOKEN for service in job.spec.services},
        servers_token=TOKEN,
        access_tokens={entry.name: TOKEN for entry in job.spec.generation.access},
        sandboxes_token=TOKEN,
    )
    at_once = "created at once, and kept until the RolloutJob is deleted"
    first = "created before the engines, and whenever the job is resumed; deleted when its pod has succeeded"
    engine = "created when the check is done; deleted when the job is suspended, done or failed"
    services = engine if backend.in_job else "created at once; deleted when the job is suspended, done or failed"
    if not backend.in_job:
        engine, checks = "", []
    else:
        checks = [(first, built.build_check_job(context))]
    servers = "created at once; deleted when the job is suspended, done or failed"
    worker = "created when generation is ready; suspended with the job, or when it fails"
    last = "created when all shards are done"
    pod_sets = [
        *backend.pod_sets(context),
        *built.service_pod_sets(context),
        *built.environment_pod_sets(context),
        *built.sandbox_pod_sets(context),
    ]
    queue, priority_class = queue_of(job, settings), priority_class_of(job)
    # Only the cluster knows the value of a priority class.
    priority = None if priority_class is None else built.Priority(priority_class, 0)
    waiting = "created at once; once admitted, engines and workers follow on the nodes of its quota"
    quota = (
        [] if queue is None else [(waiting, built.build_workload(context, pod_sets, queue=queue, priority=priority))]
    )
    found = [
        *quota,
        *((at_once, child) for child in built.build_token_secrets(context)),
        *((at_once, child) for child in built.build_environment_secret(context)),
        *((at_once, child) for child in built.build_service_secret(context)),
        *((at_once, child) for child in built.build_policy_access(context)),
        *((at_once, child) for child in built.build_access_secrets(context)),
        *((at_once, child) for child in built.build_sandbox_secret(context)),
        (at_once, built.build_config(context)),
        *((at_once, child) for child in built.build_environment_fixtures(context)),
        *((at_once, child) for child in built.build_service_fixtures(context)),
        *((at_once, child) for child in built.build_network_policies(context)),
        *((at_once, child) for child in backend.fixtures(context)),
        (at_once, built.build_workers_service(context)),
        *((servers, child) for child in built.build_environment_deployments(context)),
        *((servers, child) for child in built.build_sandbox_claims(context)),
        *checks,
        *((engine, child) for child in backend.engines(context, Observed(), datetime.now(UTC))),
        *((services, child) for child in built.build_service_deployments(context)),
        (worker, built.build_workers_job(context, suspend=False)),
        (last, built.build_finish_job(context)),
    ]
    return [(when, built.seal(child)) for when, child in found]


def to_yaml(value: Any) -> str:
    """YAML in block style, with multi-line texts as literal blocks."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 1 << 20
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    yaml.dump(_literal(value), text)
    return text.getvalue()


def _literal(value: Any) -> Any:
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if not isinstance(value, str) or value.isprintable():
        return value
    # Other characters than line feeds would be lost in a literal block, or make it unreadable.
    printable = all(line.isprintable() for line in value.split("\n"))
    return LiteralScalarString(value) if printable else DoubleQuotedScalarString(value)
