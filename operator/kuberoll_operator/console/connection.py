"""A user's connection to a cluster: options, default namespace, and the end of a command."""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import click

from kuberoll_operator.console.errors import ConsoleError, describe_error
from kuberoll_operator.kube.access import Access, AccessError, default_namespace, load_access
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import ApiError, Forbidden, Unauthorized
from kuberoll_operator.kube.resources import ROLLOUT_JOBS
from kuberoll_operator.model import Object

_KINDS = frozenset({"rlj", "rolloutjob", "rolloutjobs", "rolloutjob.kuberoll.io", "rolloutjobs.kuberoll.io"})


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Cluster and namespace of a command; None: kubectl's default."""

    namespace: str | None = None
    context: str | None = None

    def resolved_namespace(self) -> str:
        """The given namespace, or the kubeconfig's.

        Raises:
            AccessError: There is no default namespace.
        """
        return self.namespace or default_namespace(self.context)


@dataclass(frozen=True, slots=True)
class Connection:
    """An API server that accepts the user's credentials."""

    access: Access
    client: Client


@asynccontextmanager
async def open_connection(cluster: ClusterOptions) -> AsyncIterator[Connection]:
    """Connect to the cluster of KUBECONFIG, of the pod's service account or of ~/.kube/config.

    Raises:
        AccessError: No cluster is configured.
    """
    access = await load_access(context=cluster.context)
    async with Client(access) as client:
        yield Connection(access, client)


def job_name(text: str) -> str:
    """The name in `rlj/first` or `first`.

    Raises:
        click.BadParameter: Another kind is named, or no name.
    """
    kind, separator, name = text.rpartition("/")
    if (separator and kind.lower() not in _KINDS) or not name:
        raise click.BadParameter(f"found {text!r}; write rlj/NAME, or NAME")
    return name


async def find_job(client: Client, namespace: str, name: str) -> Object:
    """The RolloutJob of this name.

    Raises:
        ConsoleError: It does not exist.
    """
    found = await client.get(ROLLOUT_JOBS, namespace, name)
    if found is None:
        raise ConsoleError(f"there is no RolloutJob {name} in namespace {namespace} (choose another with -n)", code=2)
    return found


def run(work: Coroutine[Any, Any, int]) -> None:
    """Run a command to its end and exit with its code; an interrupted command is given time to clean up."""
    try:
        code = asyncio.run(_until_signal(work))
    except (ConsoleError, AccessError) as error:
        click.echo(f"kuberoll: {error}", err=True)
        code = error.code if isinstance(error, ConsoleError) else 2
    except ApiError as error:
        click.echo(f"kuberoll: {describe_error(error)}", err=True)
        code = 2 if isinstance(error, Forbidden | Unauthorized) else 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output has closed the pipe, as `head` does.
        sys.stderr.close()
        code = 0
    sys.exit(code)


async def _until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Exit code of the command; a signal cancels it, so that it removes what it created in the cluster."""
    task = asyncio.ensure_future(work)
    ended_by: list[int] = []

    def end(number: int) -> None:
        ended_by.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not ended_by:
            task.cancel()
            await asyncio.wait({task})
            raise
        return 128 + ended_by[0]


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for cluster and namespace; the command receives them as one argument."""

    @click.option("--namespace", "-n", help="Namespace of the job.  [default: the kubeconfig's]")
    @click.option("--context", help="Context of the kubeconfig.  [default: its current one]")
    @functools.wraps(command)
    def wrapped(*, namespace: str | None, context: str | None, **options: Any) -> Any:
        return command(cluster=ClusterOptions(namespace, context), **options)

    return wrapped
