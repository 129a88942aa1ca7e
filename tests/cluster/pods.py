"""What the tests' pods are: containers of the images of this repository, or processes of this machine."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from kuberoll_workers.data.lifetime import RUN_ID_VARIABLE
from tests.cluster.process_runtime import ProcessRuntime
from tests.cluster.runtime import Runtime
from tests.containers.containerd import Containerd, MissingTools, require_tools
from tests.containers.images import IMAGES, builder
from tests.containers.runtime import ContainerRuntime

PODS_VARIABLE = "KUBEROLL_TEST_PODS"
"""Environment variable: `containers` or `processes`; absent: containers where their images were built before."""

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "examples" / "models"

_CODE = "/opt/kuberoll-tests"
_VARIABLES = {
    # A worker whose engine went before it has nothing that it could finish, and would wait for its default.
    "KUBEROLL_DRAIN_SECONDS": "3",
}

MakeRuntime = Callable[[Path], Runtime]
"""Makes a runtime that writes its containers' logs to a directory."""


def kind_of_pods(environment: Mapping[str, str] = os.environ) -> str:
    """`containers` or `processes`: what the environment says; else containers where this checkout's images are there.

    What has changed since is built anew; the first build, of dependencies and minutes, is not begun unasked.

    Raises:
        ValueError: The environment says something else.
    """
    if given := environment.get(PODS_VARIABLE):
        if given not in ("containers", "processes"):
            raise ValueError(f"{PODS_VARIABLE} is containers or processes, not {given!r}")
        return given
    try:
        require_tools()
    except MissingTools:
        return "processes"
    found = builder()
    there = all(found.has_built(IMAGES[role]) for role in ("worker", "generation"))
    return "containers" if there else "processes"


def processes(session_id: str) -> MakeRuntime:
    """Processes that carry the tests' identity, and run the same code as these."""
    code = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {RUN_ID_VARIABLE: session_id, "PYTHONPATH": os.pathsep.join(code), **_VARIABLES}
    return functools.partial(ProcessRuntime, environment)


def containers(containerd: Containerd) -> MakeRuntime:
    """Containers of the images, which see the tests' own modules, and models where jobs of tests have them."""
    environment = {"PYTHONPATH": _CODE, **_VARIABLES}
    folders = {f"{_CODE}/tests": ROOT / "tests", str(MODELS): MODELS}
    return functools.partial(ContainerRuntime, containerd, environment=environment, folders=folders)
