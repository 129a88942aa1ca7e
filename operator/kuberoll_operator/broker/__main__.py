"""`python -m kuberoll_operator.broker`: runs the broker, with settings from the environment."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import click

from kuberoll_api.logs import log_to_stderr
from kuberoll_operator.broker.app import BrokerApp
from kuberoll_operator.broker.settings import BrokerSettings
from kuberoll_operator.kube.access import AccessError


@click.command()
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Instead of KUBECONFIG, the pod's service account or ~/.kube/config.",
)
def main(kubeconfig: Path | None) -> None:
    """Run the broker: make and remove the pods of sandboxes for the workers of RolloutJobs."""
    try:
        settings = BrokerSettings.from_environment(os.environ)
        log_to_stderr(settings.log_level)
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)
        settings.signing_key()
        status = asyncio.run(BrokerApp(settings, kubeconfig=kubeconfig).run())
    except (ValueError, AccessError, OSError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(status)


if __name__ == "__main__":
    main()
