"""Exit codes of a pod by error: permanent ones must not be retried."""

from __future__ import annotations

from pydantic import ValidationError

from kuberoll_api.contract import EXIT_FAILED, EXIT_REFUSED
from kuberoll_api.plugins import MissingPlugin
from kuberoll_workers.data.lasting import is_lasting
from kuberoll_workers.data.record import RecordError
from kuberoll_workers.data.tokenization import TemplateRefused
from kuberoll_workers.data.tracebacks import with_frames
from kuberoll_workers.dataset.rows import DatasetError
from kuberoll_workers.environments.outcome import StepInvalid
from kuberoll_workers.environments.registry import UnusableEnvironment
from kuberoll_workers.output.run_directory import RunRefused
from kuberoll_workers.output.run_files import NotARun
from kuberoll_workers.output.storage import StorageError
from kuberoll_workers.pods.files import ConfigRefused
from kuberoll_workers.policy.interface import PolicyRefused

_REFUSALS = (
    ConfigRefused,
    DatasetError,
    MissingPlugin,
    NotARun,
    RecordError,
    RunRefused,
    StorageError,
    TemplateRefused,
    UnusableEnvironment,
    ValidationError,
)


def is_permanent(error: BaseException) -> bool:
    """True if a retry cannot succeed.

    The chain of causes decides: a DatasetError may also mean that a server did not respond.
    """
    # A child process of an environment says which of its faults are lasting: those are StepInvalid.
    return isinstance(error, _REFUSALS) and is_lasting(error, *_REFUSALS, PolicyRefused, StepInvalid)


def exit_status(error: BaseException) -> tuple[int, str]:
    """The exit code and the cause for the termination message."""
    if is_permanent(error):
        return EXIT_REFUSED, with_frames(error)
    return EXIT_FAILED, f"{type(error).__name__}: {with_frames(error)}"
