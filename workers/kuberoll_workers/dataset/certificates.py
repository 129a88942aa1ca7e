"""Certificates of a dataset's rows: what they say, where they are, and whether a row has one that is valid.

`kuberoll certify` writes them; a run that demands them, and the check of a job in a cluster, only read them.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import orjson

from kuberoll_api.manifest.certificates import certificates_file
from kuberoll_api.manifest.tasks import directories_of, files_of_task
from kuberoll_api.model.environments import Environment
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.dataset.expansion import expand
from kuberoll_workers.dataset.inputs import checked_rows, prompt_groups, repeats_of
from kuberoll_workers.dataset.reading import EnvironmentSource
from kuberoll_workers.dataset.rows import DatasetError, Row
from kuberoll_workers.dataset.sources import resolve_path, resolve_uri
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.source_digest import source_digest

FORMAT: Final = 1
"""Number of the format; certificates of another one are not valid."""

MOST_NAMED: Final = 10
"""Most rows that a refusal names."""

Verdict = Literal["certified", "refused", "unproven"]
NetworkUse = Literal["needed", "not needed"]


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"kind": "class"}):
    """Something that is wrong with the rewards of a row, or that should be looked at.

    Attributes:
        kind: Its class, such as `never_passes`; `class` in the file.
        text: What was found, in plain words.
        trial: Name of the answer that it was found with; empty: none.
        rate: Estimate of the share of gradings that differ from the others; None: it is not about a rate.
        low, high: 95 % confidence interval of the rate.
    """

    kind: str
    text: str
    trial: str = ""
    rate: float | None = None
    low: float | None = None
    high: float | None = None


class Tried(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An answer that was graded.

    Attributes:
        kind: `solution`, `nothing` or `attack`.
        rewards: Reward of each repetition, in their order; None: it had none.
        problems: Why there was none, each once.
        network: Whether there was a network, other than usual; None: as usual.
        seconds: Longest time of a repetition, in seconds.
        memory: Most memory of a process of the grader, in bytes; None: it was not measured.
        detail: What the grader said last, shortened.
    """

    kind: str
    name: str
    rewards: list[float | None]
    problems: list[str] = []
    network: bool | None = None
    seconds: float = 0.0
    memory: int | None = None
    detail: str = ""


class Certificate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of the rewards of one row.

    Attributes:
        row: Digest of the row.
        where: Its place when it was tried (`place_of`).
        environment: Name of its environment, in the job.
        code: Digest of the grader's code; None: unknown.
        config: Digest of the environment's type or entrypoint, and config.
        image: The image that it is graded in; None: none.
        repetitions: How often each answer was graded.
        full_reward: Reward of a right answer.
        network: Whether a right answer needs a network to get it; None: not known.
        unproven: What could not be shown, and why.
        date: When it was tried, in UTC.
    """

    format: int = FORMAT
    row: str
    where: str
    idx: Any = None
    environment: str
    code: str | None = None
    config: str
    image: str | None = None
    verdict: Verdict
    findings: list[Finding] = []
    warnings: list[Finding] = []
    unproven: list[str] = []
    repetitions: int
    full_reward: float = 1.0
    network: NetworkUse | None = None
    trials: list[Tried] = []
    seconds: float = 0.0
    versions: dict[str, str] = {}
    date: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is about: a newer one of the same key takes its place."""
        return self.row, self.environment, self.config


@dataclass(frozen=True, slots=True)
class Grader:
    """Digests of what grades the rows of an environment.

    Attributes:
        code: Of its source code; None: unknown.
        config: Of its type or entrypoint, and its config.
    """

    code: str | None
    config: str


def graders_of(job: RolloutJob, remote: Mapping[str, str | None]) -> dict[str, Grader]:
    """The graders of a job's environments, by name.

    Args:
        remote: Digests of the code of those that are on servers elsewhere.
    """
    return {
        spec.name: Grader(remote[spec.name] if spec.name in remote else source_digest(spec), _config_digest(spec))
        for spec in job.spec.environments
    }


def _config_digest(spec: Environment) -> str:
    plain = PlainSpec.of(spec)
    return _digest([plain.type, plain.entrypoint, dict(plain.config)])


def row_digest(row: Row, base: Path) -> str:
    """Digest of what a row is graded by, and of the files of its task; its place and its sampling do not count.

    Args:
        base: Directory of relative paths: the manifest's.
    """
    parts = [row.task_name, row.messages, row.metadata, row.tools, row.stop_strings]
    files = [
        [file.relative_to(directory).as_posix(), hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()]
        for _, name in directories_of([{"metadata": row.metadata}])
        for directory in [resolve_path(name, base)]
        for file in files_of_task(directory)
    ]
    return _digest([*parts, files] if files else parts)


def place_of(row: Row, base: Path) -> str:
    """A row's place, the same on the machine that has tried it and in a pod: relative to the manifest's directory."""
    return row.where.removeprefix(f"{base}/")


def _digest(value: Any) -> str:
    text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def location_of(job: RolloutJob, base: Path) -> str:
    """Path or URI of the certificates of a job's rows.

    Args:
        base: The manifest's directory.
    """
    return resolve_uri(certificates_file(job), base)


def read_certificates(location: str) -> Iterator[Certificate]:
    """Certificates in a file, in their order; none if it does not exist, or a line is not one.

    A line that was not written to its end says nothing, as does one of another version's format.

    Raises:
        DatasetError: The file cannot be read.
    """
    try:
        if "://" in location:
            import fsspec

            with fsspec.open(location, "rb") as file:
                lines = file.read().splitlines()
        else:
            lines = Path(location).read_bytes().splitlines()
    except FileNotFoundError:
        return
    except (OSError, ImportError) as error:
        raise DatasetError(f"spec.dataset.certify: {location} cannot be read: {error}") from error
    decoder = msgspec.json.Decoder(Certificate)
    for line in lines:
        try:
            found = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if found.format == FORMAT:
            yield found


class Certificates:
    """The newest certificate of each row."""

    def __init__(self, found: Iterable[Certificate]) -> None:
        self._by_key = {certificate.key: certificate for certificate in found}
        self._by_row: dict[str, list[Certificate]] = {}
        for certificate in self._by_key.values():
            self._by_row.setdefault(certificate.row, []).append(certificate)
        self._by_place = {(one.where, one.environment): one for one in self._by_key.values()}

    def __len__(self) -> int:
        return len(self._by_key)

    def valid(self, row: str, environment: str, grader: Grader, *, repetitions: int = 1) -> Certificate | None:
        """The certificate of a row by this grader; None if there is none that is valid.

        Args:
            row: The row's digest.
            repetitions: Least number of times that each answer must have been graded.
        """
        found = self._by_key.get((row, environment, grader.config))
        return None if found is None or found.code != grader.code or found.repetitions < repetitions else found

    def why_not(self, row: str, where: str, environment: str, grader: Grader) -> str:
        """Why a row has no valid certificate, in plain words."""
        found = self._by_key.get((row, environment, grader.config))
        if found is not None and found.code != grader.code:
            return "the grader's code has changed since"
        if found is not None:
            return f"each answer was graded only {_times(found.repetitions)}"
        if any(one.environment == environment for one in self._by_row.get(row, ())):
            return "the environment's config has changed since"
        if (where, environment) in self._by_place:
            return "the row has changed since"
        return "it has no certificate"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


@dataclass(slots=True, kw_only=True)
class Coverage:
    """What the certificates say of a job's rows.

    Attributes:
        location: Where they are.
        problems: Counts of reasons for which rows may not be trusted.
        named: The first of these rows, each with the reason.
    """

    location: str
    rows: int = 0
    certified: int = 0
    unproven: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Number of rows that may not be trusted."""
        return self.problems.total()

    def __str__(self) -> str:
        """`of 120 rows 118 are certified, 1 unproven, 1 without a valid certificate`."""
        counts = f"of {self.rows:,} rows {self.certified:,} are certified, {self.unproven:,} unproven"
        return f"{counts}, {self.wrong:,} without a certificate that is valid and good ({self.location})"

    def refusal(self) -> str:
        """The rows that may not be trusted, each with the reason: the first, then counts."""
        lines = [f"spec.dataset.certify: {self}"]
        lines += [f"  {one}" for one in self.named]
        if self.wrong > len(self.named):
            lines.append(f"  these are the first {len(self.named)}; in all:")
            lines += [f"  {count:,}: {reason}" for reason, count in self.problems.most_common(MOST_NAMED)]
        lines.append("try the rows with `kuberoll certify`, leave out those that are refused, or set mode: Warn")
        return "\n".join(lines)


def coverage(
    job: RolloutJob,
    *,
    base: Path,
    environment: EnvironmentSource,
    remote: Callable[[], Mapping[str, str | None]],
) -> Coverage | None:
    """Compare a job's rows with their certificates; None if the job demands none.

    Args:
        base: The manifest's directory.
        environment: Creates an environment by name, if rows are generated.
        remote: Asks for the digests of environments that are on servers elsewhere.

    Raises:
        DatasetError: A row, or the file of the certificates, cannot be read.
    """
    demand = job.spec.dataset.certify
    if demand.mode == "Ignore":
        return None
    found = Coverage(location=location_of(job, base))
    certificates = Certificates(read_certificates(found.location))
    graders = graders_of(job, remote())
    for row in rows_of(job, base=base, environment=environment):
        digest, grader = row_digest(row, base), graders[row.task_name]
        found.rows += 1
        valid = certificates.valid(digest, row.task_name, grader, repetitions=demand.repetitions)
        if valid is None:
            reason = text = certificates.why_not(digest, place_of(row, base), row.task_name, grader)
        elif valid.verdict == "refused":
            reason = " and ".join(sorted({finding.kind for finding in valid.findings}))
            text = "; ".join(finding.text for finding in valid.findings)
        elif valid.verdict == "unproven" and demand.strict:
            reason, text = "unproven", f"unproven: {'; '.join(valid.unproven)}"
        else:
            found.certified += valid.verdict == "certified"
            found.unproven += valid.verdict == "unproven"
            continue
        found.problems[reason] += 1
        if len(found.named) < MOST_NAMED:
            found.named.append(f"{row.where}: {text}")
    return found


def rows_of(job: RolloutJob, *, base: Path, environment: EnvironmentSource, leave_out: bool = False) -> Iterator[Row]:
    """The rows of a job's tasks, each task once.

    Args:
        leave_out: Leave out invalid rows.

    Raises:
        DatasetError: A row is invalid.
    """
    expected = itertools.count()
    number = next(expected)
    if leave_out:
        valid = checked_rows(job, base=base, environment=environment, refused=lambda error: None)  # noqa: ARG005
        groups = expand(valid, repeats_of(job))
    else:
        groups = prompt_groups(job, base=base, environment=environment, epochs=1)
    for group in groups:
        if group.task_index == number:
            number = next(expected)
            yield group.row
