"""The check Job: a worker pod that checks its inputs and exits, before any engine is started.

Whatever would keep workers from starting (a missing claim or Secret, a quota, an environment's type, a row of the
dataset, an output that cannot be written) is found before a GPU is requested.
"""

from __future__ import annotations

from typing import Final

from kuberoll_api import contract
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.objects import shaped
from kuberoll_operator.render.workers import failure_policy, worker_template

MUTABLE: Final = frozenset({"suspend"})

RETRIES: Final = 3


def build_check_job(context: RenderContext, *, suspend: bool = False) -> Object:
    """Job <job>-check: one pod, a worker's in everything but its arguments."""
    child = context.child("batch/v1", "Job", names.check(context.name), names.CHECK)
    child["spec"] = {
        "backoffLimit": RETRIES,
        "completions": 1,
        "parallelism": 1,
        "podFailurePolicy": failure_policy("worker", ignored=(contract.EXIT_DRAINED,)),
        "podReplacementPolicy": "Failed",
        "suspend": suspend,
        "template": worker_template(context, names.CHECK, arguments=("--check",)),
    }
    return shaped(child, MUTABLE)
