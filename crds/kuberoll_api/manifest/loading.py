"""Loading of RolloutJobs from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from pydantic import ValidationError

from kuberoll_api.manifest.documents import Document, DocumentError, read_documents
from kuberoll_api.manifest.mistakes import explain
from kuberoll_api.manifest.overrides import OverrideError, apply_overrides
from kuberoll_api.model.rolloutjob import API_VERSION, GROUP, KIND, RolloutJob
from kuberoll_api.paths import Path, format_path, shown

__all__ = [
    "MOST_SHOWN",
    "LoadedJob",
    "Manifest",
    "ManifestError",
    "Mistake",
    "load_job",
    "load_jobs",
    "load_manifest",
]

MOST_SHOWN = 20
"""Maximum number of mistakes in the text of a ManifestError."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a manifest.

    Attributes:
        file: The manifest's path, as it was given.
        line: Line number from 1; None for the whole file, or for an override.
        field: Path of the field, e.g. spec.environments[1].type; empty for a whole document.
        message: What was found, what is allowed, and the remedy.
        override: Text of the command-line option that set the value; None if the file did.
    """

    file: str
    line: int | None
    field: str
    message: str
    override: str | None = None

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(filter(None, (self.override or place, shown(self.field), self.message)))


class ManifestError(ValueError):
    """A manifest that cannot be used; its text fits on a screen.

    Attributes:
        mistakes: All mistakes, in the order of the file.
    """

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__(mistakes)
        self.mistakes = mistakes

    def __str__(self) -> str:
        shown = [str(mistake) for mistake in self.mistakes[:MOST_SHOWN]]
        more = len(self.mistakes) - len(shown)
        return "\n".join([*shown, f"and {more} more"] if more else shown)


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """A RolloutJob with its document, for messages about its lines.

    Attributes:
        file: The manifest's path, as it was given.
    """

    job: RolloutJob
    document: Document
    file: str

    def mistake(self, path: Path, message: str) -> Mistake:
        """A mistake at a field, which may be absent."""
        return _mistake(path, message, self.document, self.file)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A file's RolloutJobs, at least one, and its objects of other APIs."""

    jobs: tuple[LoadedJob, ...]
    others: tuple[Document, ...]


def load_job(path: FilePath, overrides: Sequence[str] = ()) -> RolloutJob:
    """The only RolloutJob of a file.

    Args:
        overrides: `path=value` texts, applied before the job is checked.

    Raises:
        ManifestError: The file has mistakes, of which the error has all, or several jobs.
    """
    jobs = load_jobs(path, overrides)
    if len(jobs) > 1:
        names = ", ".join(job.metadata.name for job in jobs)
        message = f"there are {len(jobs)} RolloutJobs ({names}); put the one to use into a separate file"
        raise ManifestError([Mistake(str(path), None, "", message)])
    return jobs[0]


def load_jobs(path: FilePath, overrides: Sequence[str] = ()) -> list[RolloutJob]:
    """The RolloutJobs of a file, at least one; objects of other APIs are ignored.

    Args:
        overrides: `path=value` texts, applied to each job before it is checked.

    Raises:
        ManifestError: The file has mistakes; the error has all of them.
    """
    return [loaded.job for loaded in load_manifest(path, overrides).jobs]


def load_manifest(path: FilePath, overrides: Sequence[str] = ()) -> Manifest:
    """The objects of a file.

    Args:
        overrides: `path=value` texts, applied to each job before it is checked.

    Raises:
        ManifestError: The file has mistakes; the error has all of them.
    """
    file = str(path)
    try:
        documents = read_documents(path)
    except DocumentError as error:
        raise ManifestError([Mistake(file, error.line, "", str(error))]) from error
    ours = [document for document in documents if not _is_foreign(document)]
    if not ours:
        raise ManifestError([_no_job(documents, file)])
    jobs: list[LoadedJob] = []
    mistakes: list[Mistake] = []
    for document in ours:
        job, found = _check(document, overrides, file)
        jobs += [job] if job is not None else []
        mistakes += found
    if mistakes:
        raise ManifestError(list(dict.fromkeys(mistakes)))
    return Manifest(tuple(jobs), tuple(document for document in documents if _is_foreign(document)))


def _check(document: Document, overrides: Sequence[str], file: str) -> tuple[LoadedJob | None, list[Mistake]]:
    """The job of a document, or all its mistakes, sorted by line; those of overrides come first."""
    mistakes: list[Mistake] = []
    for override in overrides:
        try:
            document = apply_overrides(document, [override])
        except OverrideError as error:
            mistakes.append(Mistake(file, None, "", error.message, error.override))
    # Values that only YAML can express were replaced by null, which is not another mistake.
    known = {problem.path for problem in document.problems}
    mistakes += [Mistake(file, item.line, format_path(item.path), item.message) for item in document.problems]
    job = None
    try:
        job = LoadedJob(RolloutJob.model_validate(document.value), document, file)
    except ValidationError as error:
        found = explain(error, document.value)
        mistakes += [_mistake(path, message, document, file) for path, message in found if path not in known]
    return (None if mistakes else job), sorted(mistakes, key=lambda mistake: mistake.line or 0)


def _mistake(path: Path, message: str, document: Document, file: str) -> Mistake:
    override = document.override_of(path)
    line = document.line_of(path) if override is None else None
    return Mistake(file, line, format_path(path), message, override)


def _is_foreign(document: Document) -> bool:
    """True for a well-formed object of another API, e.g. a ConfigMap beside the job."""
    value = document.value
    version = value.get("apiVersion") if isinstance(value, dict) else None
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(version, str) or not isinstance(kind, str):
        return False
    return version.partition("/")[0] != GROUP and kind != KIND


def _no_job(documents: list[Document], file: str) -> Mistake:
    header = f"a RolloutJob begins with apiVersion: {API_VERSION} and kind: {KIND}"
    if not documents:
        return Mistake(file, None, "", f"the file is empty; {header}")
    kinds = ", ".join(str(document.value["kind"]) for document in documents)
    return Mistake(file, documents[0].line_of(("kind",)), "kind", f"found only {kinds}; {header}")
