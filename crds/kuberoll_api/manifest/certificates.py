"""Where the certificates of a job's rows are: beside its dataset, or beside its manifest."""

from __future__ import annotations

from typing import Final

from kuberoll_api.model.rolloutjob import RolloutJob

SUFFIX: Final = ".certificates.jsonl"
"""End of the names of files with certificates, which are never rows."""

_WILDCARDS: Final = "*?["


def certificates_file(job: RolloutJob) -> str:
    """Path, relative to the manifest or absolute, or URI of the certificates of a job's rows."""
    if (given := job.spec.dataset.certify.file) is not None:
        return given
    sources = [source for _, source in job.spec.dataset.located_sources()]
    uri = sources[0].uri if len(sources) == 1 else None
    local = (uri or "").removeprefix("file://")
    if not local or "://" in local or any(letter in local for letter in _WILDCARDS):
        return f"{job.metadata.name}{SUFFIX}"
    return f"{local.rstrip('/')}{SUFFIX}"
