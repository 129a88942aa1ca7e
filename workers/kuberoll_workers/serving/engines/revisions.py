"""The commits of a replica's model and tokenizer at the hub, which its branches had when it started."""

from __future__ import annotations

from typing import NamedTuple

from kuberoll_workers.data.provenance import hub_commit
from kuberoll_workers.data.tokenizer_files import model_directory, tokenizer_directory


class Revisions(NamedTuple):
    """Revisions to load.

    Attributes:
        model, tokenizer: Of each; None: its default branch, of the tokenizer the model's.
        commit: That of the model; None: it is not of the hub, or the hub does not say it.
    """

    model: str | None
    tokenizer: str | None
    commit: str | None


def pinned_revisions(*, model: str, tokenizer: str, revision: str | None, tokenizer_revision: str | None) -> Revisions:
    """Resolve the branches of a model and its tokenizer once, so that all parts that a replica loads are of one commit.

    A branch may move while they are loaded, or before the model's own weights are loaded again.
    """
    directory = model_directory(model, revision)
    commit = None if directory is None else hub_commit(directory)
    if tokenizer != model and (found := tokenizer_directory(tokenizer, tokenizer_revision)) is not None:
        # The model's revision is none of another repository.
        tokenizer_revision = hub_commit(found) or tokenizer_revision
    return Revisions(commit or revision, tokenizer_revision, commit)
