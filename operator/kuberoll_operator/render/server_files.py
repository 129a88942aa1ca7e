"""Files beside the manifest that an environment's server pods get: code, and no rows of the dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from kuberoll_api.model.environments import Environment
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.model.workers import FilesConfigMap

_CODE = ".py"
_PACKAGE = "__init__.py"
_LONGEST = 1024


def server_files(job: RolloutJob, spec: Environment) -> FilesConfigMap | None:
    """The ConfigMap of `workers.files` with the items that server pods of an environment mount; None: no files.

    Left out are rows: files that the dataset names, but those that a server may need, which are modules, data of
    packages, and what a text of the environment's config names. Without items, the keys are not known: all are mounted.
    """
    if job.spec.workers.files is None:
        return None
    given = job.spec.workers.files.config_map
    if not given.items:
        return given
    paths = [item.path for item in given.items]
    left_out = set(_rows(job, paths)) - set(_named(spec.config, paths))
    items = [item for item in given.items if item.path not in left_out]
    return given.model_copy(update={"items": items}) if items else None


def _rows(job: RolloutJob, paths: Sequence[str]) -> Iterator[str]:
    packages = {path.removesuffix(_PACKAGE) for path in paths if path.endswith(f"/{_PACKAGE}")}
    uris = [source.uri for _, source in job.spec.dataset.located_sources() if source.uri is not None]
    for path in paths:
        if path.endswith(_CODE) or any(path.startswith(package) for package in packages):
            continue
        if any(_holds(uri, path) for uri in uris):
            yield path


def _holds(uri: str, path: str) -> bool:
    """True if a dataset at a relative path (a file, a directory or a pattern of `Path.glob`) has the file."""
    words = [word for word in uri.split("/") if word not in ("", ".")]
    parts = path.split("/")
    return words in (parts, parts[:-1]) or matches(words, parts)


def matches(words: Sequence[str], parts: Sequence[str]) -> bool:
    """True if a path matches a pattern of `Path.glob`, both by their parts; in a time that no pattern makes long."""
    # Numbers of parts that the words so far may stand for.
    reached = {0}
    for word in words:
        if word == "**":
            reached = set(range(min(reached), len(parts) + 1))
        else:
            reached = {end + 1 for end in reached if end < len(parts) and fnmatchcase(parts[end], word)}
        if not reached:
            return False
    return len(parts) in reached


def _named(config: Any, paths: Iterable[str]) -> Iterator[str]:
    """The files whose path, or a directory above, is a text of a config, or the end of one."""
    texts = {
        end for text in _texts(config) if len(text) <= _LONGEST for end in _ends(text.rstrip("/").removeprefix("./"))
    }
    for path in paths:
        if any(place in texts for place in (path, *(path[:end] for end, letter in enumerate(path) if letter == "/"))):
            yield path


def _ends(text: str) -> Iterator[str]:
    """A path, and what follows each of its slashes."""
    yield text
    yield from (text[start + 1 :] for start, letter in enumerate(text) if letter == "/")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
