"""Exit codes of a pod by error: permanent ones must not be retried."""

from __future__ import annotations

from pydantic import ValidationError

from kuberoll_api.contract import EXIT_FAILED, EXIT_REFUSED
from kuberoll_workers.data.observations import TemplateRefused
from kuberoll_workers.data.record import RecordError
from kuberoll_workers.data.tracebacks import with_frames
from kuberoll_workers.dataset.rows import DatasetError
from kuberoll_workers.environments.registry import UnusableEnvironment
from kuberoll_workers.output.run_directory import RunRefused
from kuberoll_workers.output.run_files import NotARun
from kuberoll_workers.output.storage import StorageError
from kuberoll_workers.pods.files import ConfigRefused
from kuberoll_workers.policy.interface import PolicyRefused

_REFUSALS = (
    ConfigRefused,
    DatasetError,
    NotARun,
    RecordError,
    RunRefused,
    StorageError,
    TemplateRefused,
    UnusableEnvironment,
    ValidationError,
)
# Causes that a retry does not change; any other cause of a refusal may be temporary.
_LASTING = (
    *_REFUSALS,
    ArithmeticError,
    AssertionError,
    AttributeError,
    FileNotFoundError,
    ImportError,
    IsADirectoryError,
    LookupError,
    NotADirectoryError,
    NotImplementedError,
    PermissionError,
    PolicyRefused,
    SyntaxError,
    TypeError,
    ValueError,
)


def is_permanent(error: BaseException) -> bool:
    """True if a retry cannot succeed.

    The chain of causes decides: a DatasetError may also mean that a server did not respond.
    """
    if not isinstance(error, _REFUSALS):
        return False
    cause: BaseException | None = error
    while cause is not None:
        if not isinstance(cause, _LASTING):
            return False
        cause = cause.__cause__
    return True


def exit_status(error: BaseException) -> tuple[int, str]:
    """The exit code and the cause for the termination message."""
    if is_permanent(error):
        return EXIT_REFUSED, with_frames(error)
    return EXIT_FAILED, f"{type(error).__name__}: {with_frames(error)}"
