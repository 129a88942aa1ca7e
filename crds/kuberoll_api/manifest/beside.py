"""Files beside a manifest that a job needs: modules and programs of its environments, rows and tasks of its dataset.

`kuberoll run` reads them where they are; in a cluster `kuberoll apply` ships them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Final, NamedTuple

from kuberoll_api.manifest.certificates import certificates_file
from kuberoll_api.manifest.modules import files_of_modules, imported_modules, module_file
from kuberoll_api.manifest.tasks import directories_of, files_of_task, is_task, rows_of, tasks_in
from kuberoll_api.model.dataset import DatasetSource
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.model.types import FILE_PATH_PATTERN
from kuberoll_api.paths import Path

MAX_BYTES: Final = 1 << 20
"""Maximum size of a ConfigMap's values."""

MAX_FILES: Final = 256
"""Maximum number of files, as in `workers.files`."""

MAX_PATH: Final = 512
"""Maximum length of a file's path."""

_MOST_NAMED: Final = 5
_WILDCARDS: Final = "*?["
_ELSEWHERE: Final = "an object store (s3://bucket/rows.jsonl), a volume (dataset.source.pvc) or the Hugging Face hub"
_TASKS_ELSEWHERE: Final = (
    "write the absolute path of a directory below a volume that workers mount (workers.podTemplate), or a relative "
    "path, below the manifest's directory, to ship it"
)
_LINES: Final = (".jsonl", ".ndjson")
_PHASES: Final = ("setup", "command", "score")
_OWN_PACKAGES: Final = ("kuberoll_workers", "kuberoll_api")


class Finding(NamedTuple):
    """A remark about a field.

    Attributes:
        path: The field; empty for the job as a whole.
    """

    path: Path
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesBeside:
    """Files that a job needs from the manifest's directory.

    Attributes:
        files: The files, by path relative to the manifest's directory, sorted.
        problems: Files that are needed and cannot be shipped.
        notes: Modules that have to come from elsewhere.
    """

    files: dict[str, FilePath]
    problems: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(path.stat().st_size for path in self.files.values())

    def __str__(self) -> str:
        """`guessing.py, prompts.jsonl (3.1 KiB)`."""
        names = list(self.files)
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return f"{', '.join(names[:_MOST_NAMED])}{more} ({size_text(self.size)})"


def files_beside(job: RolloutJob, base: FilePath, *, include: Sequence[str] = ()) -> FilesBeside:
    """Find the files of a job beside its manifest; files are read only to follow imports.

    Args:
        base: The manifest's directory.
        include: Patterns of further files, relative to `base`.

    Raises:
        OSError: A file cannot be read.
    """
    notes = list(_modules_elsewhere(job, base))
    entrypoints = [environment.own_entrypoint or "" for environment in job.spec.environments]
    found = files_of_modules(base, [entrypoint.partition(":")[0] for entrypoint in entrypoints])
    rows, problems = _rows(job, base)
    programs, more_problems = _programs(job, base)
    found += rows + programs
    if (certificates := _certificates(job, base)) is not None:
        found.append(certificates)
    problems += more_problems
    for pattern in include:
        more = [path for path in sorted(base.glob(pattern)) if path.is_file()] if _is_below(pattern) else []
        found += more
        if not more:
            problems.append(Finding((), f"--include {pattern}: no file below {base} matches"))
    files = {path.relative_to(base).as_posix(): path for path in sorted(set(found))}
    problems += _limits(files)
    return FilesBeside(files=files, problems=tuple(problems), notes=tuple(notes))


def size_text(size: int) -> str:
    """A number of bytes as text: `512 B`, `3.1 KiB`, `12.0 MiB`."""
    if size < 1 << 10:
        return f"{size} B"
    return f"{size / (1 << 10):.1f} KiB" if size < 1 << 20 else f"{size / (1 << 20):.1f} MiB"


def _modules_elsewhere(job: RolloutJob, base: FilePath) -> Iterator[Finding]:
    for number, environment in enumerate(job.spec.environments):
        module = (environment.own_entrypoint or "").partition(":")[0]
        if not module or module.partition(".")[0] in _OWN_PACKAGES or module_file(base, module) is not None:
            continue
        message = f"there is no module {module} beside the manifest, so the workers' image must have it installed"
        if module_file(FilePath.cwd(), module) is not None:
            message += "; it is in the working directory: move it beside the manifest to ship it"
        yield Finding(("spec", "environments", number, "entrypoint"), message)


def _rows(job: RolloutJob, base: FilePath) -> tuple[list[FilePath], list[Finding]]:
    """Files of a local dataset, and problems with them."""
    found: list[FilePath] = []
    problems: list[Finding] = []
    for path, source in job.spec.dataset.located_sources():
        files, problem = _files_of(job, source, path, base)
        found += files
        problems += problem
        if _has_tasks(job):
            tasks, problem = _tasks_of_rows(job, source, path, files, base)
            found += tasks
            problems += problem
    return found, problems


def _certificates(job: RolloutJob, base: FilePath) -> FilePath | None:
    """The file beside the manifest with the certificates that a job demands; None: there is none to ship."""
    name = certificates_file(job)
    if job.spec.dataset.certify.mode == "Ignore" or "://" in name or not _is_below(name) or not (base / name).is_file():
        return None
    return base / name


def _has_tasks(job: RolloutJob) -> bool:
    return any(environment.sandbox is not None for environment in job.spec.environments)


def _tasks_of_rows(
    job: RolloutJob, source: DatasetSource, path: Path, files: Sequence[FilePath], base: FilePath
) -> tuple[list[FilePath], list[Finding]]:
    """Files of the tasks that rows name (`metadata.task.directory`), and problems with them."""
    named: list[tuple[Path, str, str]] = [
        ((*path, "rows", number), "", name) for number, name in directories_of(source.rows or ())
    ]
    for file in files:
        if file.suffix in _LINES and file.stat().st_size <= MAX_BYTES:
            where = file.relative_to(base).as_posix()
            named += [((*path, "uri"), f"{where}:{row + 1}: ", name) for row, name in directories_of(rows_of(file))]
    found: list[FilePath] = []
    problems: list[Finding] = []
    for name in dict.fromkeys(name for _, _, name in named):
        place, where = next((place, where) for place, where, other in named if other == name)
        if name.startswith(("/", "~")):
            if not _is_mounted(job, name):
                words = f"{where}metadata.task.directory: {name} is a path of this machine; {_TASKS_ELSEWHERE}"
                problems.append(Finding(place, words))
        elif not _is_below(name) or not (base / name).is_dir():
            words = f"{where}metadata.task.directory: there is no directory {name} below the manifest's to ship"
            problems.append(Finding(place, words))
        else:
            found += files_of_task(base / name)
    return found, problems


def _programs(job: RolloutJob, base: FilePath) -> tuple[list[FilePath], list[Finding]]:
    """Files beside the manifest that agents' programs are, with what they import, and paths that no pod has."""
    found: list[FilePath] = []
    problems: list[Finding] = []
    for number, environment in enumerate(job.spec.environments):
        agent = environment.agent
        if agent is None or environment.sandbox is not None:
            # A program in a sandbox is the image's.
            continue
        words: list[tuple[Path, str]] = [
            ((name, index), word) for name in _PHASES for index, word in enumerate(getattr(agent, name) or ())
        ]
        hidden = [] if agent.hidden is None else agent.hidden.paths
        words += [(("hidden", "paths", index), word) for index, word in enumerate(hidden)]
        for at, word in words:
            file = base / word
            if word.startswith(("/", "~")):
                if _is_this_machine_s(word, base) and not _is_mounted(job, word):
                    message = (
                        f"{word} is a path of this machine; write it relative to the manifest to ship it, or name a "
                        "path of the workers' image (spec.workers.image)"
                    )
                    problems.append(Finding(("spec", "environments", number, "agent", *at), message))
            elif word.startswith("-") or not _is_below(word):
                continue
            elif file.is_file():
                found.append(file)
                if file.suffix == ".py":
                    found += files_of_modules(file.parent, imported_modules(file.read_bytes(), ""))
            elif at[0] == "hidden" and file.is_dir():
                found += files_of_task(file)
    return found, problems


def _is_this_machine_s(path: str, base: FilePath) -> bool:
    """True if a path is there, and is one that people have their own files at."""
    there = FilePath(path).expanduser()
    own = (base.absolute(), base.resolve(), FilePath.home(), FilePath(tempfile.gettempdir()))
    return there.exists() and any(there.is_relative_to(place) for place in own)


def _files_of(
    job: RolloutJob, source: DatasetSource, path: Path, base: FilePath
) -> tuple[list[FilePath], list[Finding]]:
    if source.huggingface is not None and (base / source.huggingface.name).is_dir():
        words = f"{source.huggingface.name} is a directory of this machine; use {_ELSEWHERE}"
        return [], [Finding((*path, "huggingface", "name"), words)]
    place, uri = (*path, "uri"), source.uri
    if uri is None or ("://" in uri and not uri.startswith("file://")):
        return [], []
    if uri.startswith(("file://", "/", "~")):
        if _is_mounted(job, uri):
            return [], []
        words = f"{uri} is a path of this machine; write it relative to the manifest to ship it, or use {_ELSEWHERE}"
        return [], [Finding(place, words)]
    if not _is_below(uri):
        words = f"{uri} is not below the manifest's directory, whose files are shipped; move it, or use {_ELSEWHERE}"
        return [], [Finding(place, words)]
    target = base / uri
    if _has_tasks(job) and target.is_dir() and (tasks := [target] if is_task(target) else tasks_in(target)):
        found = [file for task in tasks for file in files_of_task(task)]
    elif target.is_dir():
        found = [path for path in sorted(target.iterdir()) if path.is_file() and path.name[0] not in "._"]
    elif target.is_file():
        found = [target]
    elif any(letter in uri for letter in _WILDCARDS):
        found = [path for path in sorted(base.glob(uri)) if path.is_file()]
    else:
        found = []
    if not found:
        return [], [Finding(place, f"there is no file {target} to ship")]
    return found, []


def _is_mounted(job: RolloutJob, path: str) -> bool:
    """True if workers of the job mount a volume at a path or above it."""
    return any(path == place or path.startswith(f"{place}/") for place in job.spec.workers.mount_paths)


def _is_below(path: str) -> bool:
    return not path.startswith(("/", "~")) and ".." not in path.split("/")


def _limits(files: dict[str, FilePath]) -> list[Finding]:
    found = [
        Finding((), f"{name}: a file of this name cannot be shipped; rename it")
        for name in files
        if len(name) > MAX_PATH or re.fullmatch(FILE_PATH_PATTERN, name) is None
    ]
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total = sum(sizes.values())
    if total > MAX_BYTES or len(files) > MAX_FILES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_MOST_NAMED]
        listed = ", ".join(f"{name} {size_text(sizes[name])}" for name in largest)
        words = (
            f"the files beside the manifest do not fit into a ConfigMap: {len(files)} files of {size_text(total)}, "
            f"where {MAX_FILES} files of {size_text(MAX_BYTES)} fit; the largest: {listed}. Put rows into "
            f"{_ELSEWHERE}, code into the workers' image (spec.workers.image), and tasks onto a volume: "
            f"{_TASKS_ELSEWHERE}"
        )
        found.append(Finding((), words))
    return found
