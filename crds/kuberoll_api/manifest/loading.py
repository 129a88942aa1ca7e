"""RolloutJobs from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from pydantic import ValidationError

from kuberoll_api.manifest.documents import Document, Unreadable, read_documents
from kuberoll_api.manifest.mistakes import explain
from kuberoll_api.manifest.overrides import OverrideError, apply_overrides
from kuberoll_api.model.rolloutjob import API_VERSION, GROUP, KIND, RolloutJob
from kuberoll_api.paths import Path, format_path

__all__ = ["MOST_SHOWN", "ManifestError", "Mistake", "load_job", "load_jobs"]

MOST_SHOWN = 20
"""Most mistakes in the text of a ManifestError."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a manifest.

    Attributes:
        file: The manifest, as it was named.
        line: Counted from 1; None where the whole file, or an override, is meant.
        field: Path of the field as it is written, spec.environments[1].type; empty where a whole document is meant.
        message: What was found, what is allowed, how to mend it.
        override: The words on the command line that set the value; None where the file did.
    """

    file: str
    line: int | None
    field: str
    message: str
    override: str | None = None

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(filter(None, (self.override or place, self.field, self.message)))


class ManifestError(ValueError):
    """A manifest that cannot be used; its text fits a screen.

    Attributes:
        mistakes: All of them, in the order of the file.
    """

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__(mistakes)
        self.mistakes = mistakes

    def __str__(self) -> str:
        shown = [str(mistake) for mistake in self.mistakes[:MOST_SHOWN]]
        more = len(self.mistakes) - len(shown)
        return "\n".join([*shown, f"and {more} more"] if more else shown)


def load_job(path: FilePath, overrides: Sequence[str] = ()) -> RolloutJob:
    """The one RolloutJob of a file.

    Args:
        overrides: `path=value` texts, applied before the job is checked.

    Raises:
        ManifestError: With every mistake of the file, or that there are several jobs.
    """
    jobs = load_jobs(path, overrides)
    if len(jobs) > 1:
        names = ", ".join(job.metadata.name for job in jobs)
        message = f"there are {len(jobs)} RolloutJobs ({names}); put the one that you mean in a file of its own"
        raise ManifestError([Mistake(str(path), None, "", message)])
    return jobs[0]


def load_jobs(path: FilePath, overrides: Sequence[str] = ()) -> list[RolloutJob]:
    """The RolloutJobs of a file, at least one; objects of other APIs beside them are passed over.

    Args:
        overrides: `path=value` texts, applied to each job before it is checked.

    Raises:
        ManifestError: With every mistake of the file.
    """
    file = str(path)
    try:
        documents = read_documents(path)
    except Unreadable as error:
        raise ManifestError([Mistake(file, error.line, "", str(error))]) from error
    ours = [document for document in documents if not _is_foreign(document)]
    if not ours:
        raise ManifestError([_no_job(documents, file)])
    jobs: list[RolloutJob] = []
    mistakes: list[Mistake] = []
    for document in ours:
        job, found = _check(document, overrides, file)
        jobs += [job] if job is not None else []
        mistakes += found
    if mistakes:
        raise ManifestError(list(dict.fromkeys(mistakes)))
    return jobs


def _check(document: Document, overrides: Sequence[str], file: str) -> tuple[RolloutJob | None, list[Mistake]]:
    """The job of a document, or all its mistakes in the order of their lines, those of overrides first."""
    mistakes: list[Mistake] = []
    for override in overrides:
        try:
            document = apply_overrides(document, [override])
        except OverrideError as error:
            mistakes.append(Mistake(file, None, "", error.message, error.override))
    # In place of what YAML alone can say there is a null, which is no mistake of its own.
    known = {problem.path for problem in document.problems}
    mistakes += [Mistake(file, item.line, format_path(item.path), item.message) for item in document.problems]
    job = None
    try:
        job = RolloutJob.model_validate(document.value)
    except ValidationError as error:
        found = explain(error, document.value)
        mistakes += [_mistake(path, message, document, file) for path, message in found if path not in known]
    return (None if mistakes else job), sorted(mistakes, key=lambda mistake: mistake.line or 0)


def _mistake(path: Path, message: str, document: Document, file: str) -> Mistake:
    override = document.override_of(path)
    line = document.line_of(path) if override is None else None
    return Mistake(file, line, format_path(path), message, override)


def _is_foreign(document: Document) -> bool:
    """Whether this is a well-formed object of another API, a ConfigMap beside the job for example."""
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
