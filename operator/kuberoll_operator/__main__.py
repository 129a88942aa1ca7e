"""`python -m kuberoll_operator`: runs the operator, with settings from flags and the environment."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from pydantic import SecretStr

from kuberoll_api.logs import log_to_stderr
from kuberoll_operator.app import RESTART, Operator
from kuberoll_operator.kube.access import AccessError
from kuberoll_operator.settings import ENVIRONMENT_PREFIX, Settings


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for every setting, except for secrets: command lines are visible in lists of processes."""
    for name, field in reversed(Settings.model_fields.items()):
        if field.annotation == SecretStr | None:
            continue
        flag = "--" + name.replace("_", "-")
        text = f"{field.description} [env: {ENVIRONMENT_PREFIX}{name.upper()}]"
        if field.annotation in (bool, bool | None):
            command = click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)(command)
        else:
            command = click.option(flag, name, multiple=isinstance(field.default, tuple), help=text)(command)
    return command


@click.command()
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Instead of KUBECONFIG, the pod's service account or ~/.kube/config.",
)
@_options
def main(kubeconfig: Path | None, **options: Any) -> None:
    """Run the operator: watch RolloutJobs and create what they ask for."""
    try:
        given = {name: value for name, value in options.items() if value not in (None, ())}
        settings = Settings.from_environment(os.environ, **given)
        log_to_stderr(settings.log_level)
        # One line per object and event; errors are logged elsewhere as well.
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)
        settings.signing_key()
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    try:
        status = asyncio.run(_run(settings, kubeconfig))
    except (AccessError, OSError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(status)


async def _run(settings: Settings, kubeconfig: Path | None) -> int:
    while (status := await Operator(settings, kubeconfig=kubeconfig).run()) == RESTART:
        pass
    return status


if __name__ == "__main__":
    main()
