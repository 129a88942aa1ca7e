"""Models of the Hugging Face hub, or of a server that answers as it does (HF_ENDPOINT)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kuberoll_workers.data.model_cache.source import (
    ModelRefused,
    RemoteFile,
    RemoteModel,
    SourceUnreachable,
    in_threads,
    wanted,
)

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_CONNECTIONS: Final = (ConnectionError, TimeoutError)
_ASK_SECONDS: Final = 30.0
# What a server answers to a wrong question, in contrast to one that it cannot answer now.
_LASTING: Final = frozenset({400, 401, 403, 404, 410, 451})


class HubModel:
    """A model of the hub, with the token that `huggingface_hub` finds (HF_TOKEN)."""

    def __init__(self, name: str, revision: str | None, *, part: str = "model", every: bool = False) -> None:
        """
        Args:
            every: All files, whatever their format.
        """
        from huggingface_hub import constants

        self.name = name
        self.place = str(constants.ENDPOINT)
        self.part = part
        self.revision = revision or ""
        self.known = revision if revision is not None and _COMMIT.fullmatch(revision) else None
        self._every = every

    def find(self) -> RemoteModel:
        from huggingface_hub import HfApi

        with self._errors():
            # The server's own words for a branch that has none is another for each mirror.
            info = HfApi().model_info(
                self.name, revision=self.revision or "main", files_metadata=True, timeout=_ASK_SECONDS
            )
        commit = str(info.sha or "")
        if not _COMMIT.fullmatch(commit):
            raise SourceUnreachable(f"{self.place} names no commit of {self.name}")
        siblings = {item.rfilename: item for item in info.siblings or ()}
        names = wanted(siblings, part=self.part, every=self._every)
        if not names:
            raise ModelRefused(f"model {self.name} has no files that an engine reads ({self.place})")
        files = []
        for name in names:
            item = siblings[name]
            lfs = None if item.lfs is None else str(item.lfs.sha256)
            if item.size is None:
                files = in_threads(lambda name: self._ask(name, commit), names)
                break
            algorithm, digest = ("sha256", lfs) if lfs else ("git-sha1", str(item.blob_id or ""))
            files.append(RemoteFile(name=name, size=item.size, algorithm=algorithm if digest else "", digest=digest))
        # The description of a model is open where its files are not: only a file shows whether they may be read.
        self._ask(min(files, key=lambda file: file.size).name, commit)
        return RemoteModel(identity=commit, directory=f"snapshots/{commit}", files=files)

    def fetch(self, model: RemoteModel, file: RemoteFile, directory: Path) -> None:
        from huggingface_hub import hf_hub_download

        with self._errors(fetching=file.name):
            hf_hub_download(self.name, file.name, revision=model.identity, local_dir=directory)

    def is_digest(self, model: RemoteModel, file: RemoteFile) -> bool:  # noqa: ARG002
        return True

    def _ask(self, name: str, commit: str) -> RemoteFile:
        """What the server says of a file; asked as it is downloaded."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        with self._errors():
            found = get_hf_file_metadata(hf_hub_url(self.name, name, revision=commit), timeout=_ASK_SECONDS)
        digest = found.etag or ""
        algorithm = "sha256" if _SHA256.fullmatch(digest) else "git-sha1" if _COMMIT.fullmatch(digest) else ""
        if found.size is None:
            raise SourceUnreachable(f"{self.place} does not say the size of {self.name}/{name}")
        return RemoteFile(name=name, size=found.size, algorithm=algorithm, digest=digest if algorithm else "")

    @contextmanager
    def _errors(self, fetching: str | None = None) -> Iterator[None]:
        """Turn the library's errors into the cache's; a full disk goes through."""
        from huggingface_hub import errors

        model, remedy = f"model {self.name}", "give HF_TOKEN of one who may, in env"
        try:
            yield
        except errors.RevisionNotFoundError as error:
            raise ModelRefused(f"{model}: there is no revision {self.revision!r} at {self.place} (404)") from error
        except errors.GatedRepoError as error:
            raise ModelRefused(f"{model} is gated at {self.place}, and this job may not read it; {remedy}") from error
        except errors.RepositoryNotFoundError as error:
            words = f"{model} does not exist at {self.place}, or this job may not read it"
            raise ModelRefused(f"{words} ({_status(error) or 404}); {remedy}") from error
        except errors.HfHubHTTPError as error:
            if (status := _status(error)) in _LASTING:
                words = f"{model}: {self.place} answers {status}"
                raise ModelRefused(f"{words}; {remedy}" if status in (401, 403) else words) from error
            raise SourceUnreachable(f"{model}: {_words(error)}") from error
        except errors.HFValidationError as error:
            raise ModelRefused(f"{model}: {_words(error)}") from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None and not isinstance(error, _CONNECTIONS):
                raise
            # Of the library's HTTP client, which differs by its release, of the one for Xet's storage, and others.
            what = model if fetching is None else f"{model}/{fetching}"
            raise SourceUnreachable(f"{what}: {self.place} does not answer: {_words(error)}") from error


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
