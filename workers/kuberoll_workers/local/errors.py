"""Texts of errors for the user of a run on this machine."""

from __future__ import annotations

import errno

from kuberoll_workers.data.record import RecordError
from kuberoll_workers.output.run_directory import RunRefused
from kuberoll_workers.output.run_files import NotARun
from kuberoll_workers.output.storage import StorageError


def describe_error(error: BaseException) -> str:
    """Text of an error for the user; with the exception's type unless its message is written for users."""
    words = str(error).strip() or type(error).__name__
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{words}: free some space there first"
    for_users = isinstance(error, RecordError | RunRefused | StorageError | NotARun | OSError)
    return words if for_users else f"{type(error).__name__}: {words}"
