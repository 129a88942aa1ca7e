"""RolloutJobs from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from kuberoll_api.documents import Document, Unreadable, read_documents
from kuberoll_api.mistakes import ManifestError, Mistake, explain
from kuberoll_api.overrides import OverrideError, apply_overrides
from kuberoll_api.rolloutjob import API_VERSION, KIND, RolloutJob

__all__ = ["ManifestError", "Mistake", "load_job", "load_jobs"]


def load_jobs(path: Path, overrides: Sequence[str] = ()) -> list[RolloutJob]:
    """All RolloutJobs of a file; documents of other kinds are passed over.

    Args:
        overrides: `path=value` texts, applied to each job before it is checked.

    Raises:
        ManifestError: With every mistake of the file.
    """
    try:
        documents = read_documents(path)
    except Unreadable as error:
        where = str(path) if error.line is None else f"{path}:{error.line}"
        raise ManifestError([Mistake(where, "", str(error))]) from error
    jobs: list[RolloutJob] = []
    mistakes: list[Mistake] = []
    others: list[str] = []
    for document in documents:
        if (other := _other_kind(document)) is not None:
            others.append(other)
            continue
        try:
            document = apply_overrides(document, overrides)
            jobs.append(RolloutJob.model_validate(document.value))
        except OverrideError as error:
            raise ManifestError([Mistake("", "", str(error))]) from error
        except ValidationError as error:
            mistakes += explain(error, document, str(path))
    if not jobs and not mistakes:
        found = f"only {', '.join(others)}" if others else "the file is empty"
        mistakes.append(Mistake(str(path), "", f"there is no RolloutJob: {found}. A job begins with {_HEADER}"))
    if mistakes:
        raise ManifestError(mistakes)
    return jobs


def load_job(path: Path, overrides: Sequence[str] = ()) -> RolloutJob:
    """The one RolloutJob of a file.

    Raises:
        ManifestError: With every mistake of the file, or that there are several jobs.
    """
    jobs = load_jobs(path, overrides)
    if len(jobs) > 1:
        names = ", ".join(job.metadata.name for job in jobs)
        raise ManifestError([Mistake(str(path), "", f"there are {len(jobs)} RolloutJobs ({names}); run one at a time")])
    return jobs[0]


_HEADER = f"apiVersion: {API_VERSION} and kind: {KIND}"


def _other_kind(document: Document) -> str | None:
    """The kind of a well-formed object that is not of our group."""
    value = document.value
    if not isinstance(value, dict):
        return None
    version, kind = value.get("apiVersion"), value.get("kind")
    ours = isinstance(version, str) and version.partition("/")[0] == API_VERSION.partition("/")[0]
    foreign = isinstance(version, str) and isinstance(kind, str) and not ours and kind != KIND
    return kind if foreign else None
