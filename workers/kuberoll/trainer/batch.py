"""Batches: trajectories as padded arrays, a row for each path."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kuberoll.trainer.advantages import AdvantageFunction, short_group_factor
from kuberoll.trainer.groups import Group
from kuberoll_workers.analysis.paths import paths, until_last_response
from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.sampling import Distribution, resolved

if TYPE_CHECKING:
    import torch

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Booleans = npt.NDArray[np.bool_]
Texts = npt.NDArray[np.str_]

NO_VERSION: Final = -1
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")


class InexactTrajectory(ValueError):
    """A trajectory lacks the sampled tokens or their log-probabilities; the message names it and the remedy."""


class RowTooLong(ValueError):
    """A row does not fit into a mini-batch; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Rows of tokens, one for each path of each trajectory: one, or several of an agent's trajectory.

    Rows are in the order of their groups, then by rollout index and path. A row ends with its last response: later
    observations teach nothing. It is padded on the right, to the longest row of the batch.

    Attributes:
        input_ids: Token ids, [rows, length]; the pad id after a row's end.
        attention_mask: 1 for a row's tokens and 0 for padding, [rows, length].
        loss_mask: True for tokens that the policy sampled and no earlier row has, [rows, length].
        logprobs: Log-probability of each sampled token under the distribution that it was sampled from, 0 elsewhere,
            NaN where the response has none, [rows, length].
        policy_version: Version of the weights that sampled each token, [rows, length]: numbers, with -1 for tokens
            that were not sampled or whose version is unknown; if some version is not a whole number, texts, with ''.
        lengths: Tokens of each row, [rows].
        task_index, rollout_index: The trajectory of each row, [rows].
        path: Number of its path, 0 but for branches, [rows].
        group: Place of its group in `groups`, [rows].
        reward: Reward of its trajectory, [rows].
        advantages: Advantage of its trajectory, [rows]; None if they are not computed.
        sampling: The distributions that each row's sampled tokens are from, each once: settings by name, as
            `temperature`, `top_p` and `top_k`; None is one that is unknown. Of `rows` length.
        groups: The groups, whose trajectories have everything that is stored.
    """

    input_ids: Integers
    attention_mask: Integers
    loss_mask: Booleans
    logprobs: Floats
    policy_version: Integers | Texts
    lengths: Integers
    task_index: Integers
    rollout_index: Integers
    path: Integers
    group: Integers
    reward: Floats
    advantages: Floats | None
    groups: tuple[Group, ...]
    sampling: tuple[tuple[Distribution | None, ...], ...] = ()

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def minibatches(self, *, max_tokens: int) -> Iterator[Batch]:
        """The rows in smaller batches, each row in one, longer rows first; the same division every time.

        Args:
            max_tokens: Maximum of rows times length, with padding, of each.

        Raises:
            RowTooLong: A row alone has more tokens.
            ValueError: `max_tokens` is not positive.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens: found {max_tokens}, expected a number of tokens from 1")
        long = np.flatnonzero(self.lengths > max_tokens)
        if len(long):
            named = "; ".join(f"{self.name(row)} has {self.lengths[row]}" for row in long[:5])
            more = f" and {len(long) - 5} others" if len(long) > 5 else ""
            raise RowTooLong(
                f"rows of more than max_tokens={max_tokens} tokens: {named}{more}; raise max_tokens, or shorten "
                "trajectories with spec.rollout.maxSequenceLength"
            )
        return self._split(max_tokens)

    def _split(self, max_tokens: int) -> Iterator[Batch]:
        # By length, so that little is padding; of equal ones the first comes first.
        order = np.argsort(-self.lengths, kind="stable")
        begin = 0
        while begin < len(order):
            longest = max(1, int(self.lengths[order[begin]]))
            end = min(len(order), begin + max_tokens // longest)
            yield self._rows(np.sort(order[begin:end]))
            begin = end

    def torch(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """The arrays as tensors, by name, of the same types and shapes.

        Without `policy_version` if versions are texts, and without `advantages` if there are none.

        Raises:
            ImportError: PyTorch is not installed.
        """
        import torch

        arrays = {name: value for name, value in self._arrays() if value.dtype.kind != "U"}
        return {name: torch.from_numpy(value).to(device) for name, value in arrays.items()}

    def _arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for item in fields(self):
            if isinstance(value := getattr(self, item.name), np.ndarray):
                yield item.name, value

    def _rows(self, rows: npt.NDArray[np.intp]) -> Batch:
        length = int(self.lengths[rows].max(initial=0))
        made: dict[str, Any] = {"advantages": None}
        for name, value in self._arrays():
            made[name] = np.ascontiguousarray(value[rows, :length] if value.ndim == 2 else value[rows])
        return Batch(**made, groups=self.groups, sampling=tuple(self.sampling[row] for row in rows))

    def name(self, row: int) -> str:
        """A row's trajectory and path, for errors."""
        path = f", path {self.path[row]}" if self.path[row] else ""
        return f"task {self.task_index[row]}, rollout {self.rollout_index[row]}{path}"


def is_number(version: str) -> bool:
    """True if a version is a number; one that is written otherwise than numbers are, such as 07, is a name."""
    return _NUMBER.fullmatch(version) is not None


def is_exact(record: TrajectoryRecord) -> bool:
    """True if a trajectory has the ids that the policy sampled, and the log-probability of each."""
    branches = [branch.messages for branch in record.branches or ()]
    return record.token_source == "engine" and not any(
        message.logprobs is None for messages in (record.messages, *branches) for message in messages if message.sampled
    )


def require_exact(groups: Sequence[Group]) -> None:
    """Check that all trajectories are exact.

    Raises:
        InexactTrajectory: One is not.
    """
    for group in groups:
        for record in group.trajectories:
            if not is_exact(record):
                lacks = (
                    "its token ids were encoded from a text, and are not those that were sampled"
                    if record.token_source != "engine"
                    else "it has no log-probabilities"
                )
                raise InexactTrajectory(
                    f"task {record.task_index}, rollout {record.rollout_index}: {lacks}; open the run with "
                    'inexact="skip" to leave such trajectories out, or with inexact="keep" for a loss that does not '
                    "need them"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    record: TrajectoryRecord
    path: int
    group: int
    advantage: float
    messages: list[Message]
    length: int
    sampling: tuple[Distribution | None, ...]


def make_batch(
    groups: Sequence[Group],
    *,
    advantages: AdvantageFunction | None,
    pad_id: int,
    sampling: Distribution | None = None,
) -> Batch:
    """The batch of some groups.

    Args:
        advantages: Function of the rewards of a group's trajectories; None: none are computed.
        sampling: The distribution of responses that say none, of the run's manifest; None: unknown.

    Raises:
        ValueError: The function returned something else than a finite number for each reward.
    """
    rows = [row for place, group in enumerate(groups) for row in _rows_of(group, place, advantages, sampling)]
    shape = len(rows), max((row.length for row in rows), default=0)
    ids: Integers = np.full(shape, pad_id, np.int64)
    loss: Booleans = np.zeros(shape, np.bool_)
    logprobs: Floats = np.zeros(shape, np.float32)
    versions = _Versions(shape)
    for number, row in enumerate(rows):
        end = 0
        for message in row.messages:
            begin, end = end, end + len(message.token_ids)
            if begin == end:
                continue
            ids[number, begin:end] = message.token_ids
            if message.sampled:
                loss[number, begin:end] = True
                logprobs[number, begin:end] = np.nan if message.logprobs is None else message.logprobs
                for version, first, last in message.policy_versions or ():
                    versions.put(number, begin + first, min(end, begin + last), version)
    lengths: Integers = np.array([row.length for row in rows], np.int64)
    return Batch(
        input_ids=ids,
        attention_mask=(np.arange(shape[1]) < lengths[:, None]).astype(np.int64),
        loss_mask=loss,
        logprobs=logprobs,
        policy_version=versions.array(),
        lengths=lengths,
        task_index=np.array([row.record.task_index for row in rows], np.int64),
        rollout_index=np.array([row.record.rollout_index for row in rows], np.int64),
        path=np.array([row.path for row in rows], np.int64),
        group=np.array([row.group for row in rows], np.int64),
        reward=np.array([row.record.total_reward for row in rows], np.float32),
        advantages=None if advantages is None else np.array([row.advantage for row in rows], np.float32),
        groups=tuple(groups),
        sampling=tuple(row.sampling for row in rows),
    )


def _rows_of(
    group: Group, place: int, advantages: AdvantageFunction | None, sampling: Distribution | None
) -> Iterator[_Row]:
    rewards = np.array([record.total_reward for record in group.trajectories], np.float64)
    found = np.zeros_like(rewards) if advantages is None else np.asarray(advantages(rewards.copy()), np.float64)
    if found.shape != rewards.shape or not np.isfinite(found).all():
        raise ValueError(
            f"advantages: for {len(rewards)} rewards of task {group.key.task_index} the function returned {found!r}; "
            "it must return one finite number for each"
        )
    if advantages is not None:
        found = found * short_group_factor(advantages, len(rewards), group.wanted)
    for record, advantage in zip(group.trajectories, found, strict=True):
        for number, path in paths(record):
            messages = until_last_response(path.messages)
            yield _Row(
                record=record,
                path=number,
                group=place,
                advantage=float(advantage),
                messages=messages,
                length=sum(len(message.token_ids) for message in messages),
                sampling=_distributions(path, sampling),
            )


def _distributions(path: TrajectoryRecord, usual: Distribution | None) -> tuple[Distribution | None, ...]:
    """The distributions of a path's responses, each once."""
    if path.sampling is None:
        return (usual,) if any(message.sampled for message in path.messages) else ()
    found: list[Distribution | None] = []
    for distribution in resolved(path.sampling, len(path.sampling), usual):
        if distribution not in found:
            found.append(distribution)
    return tuple(found)


class _Versions:
    """Policy versions by token: numbers, until one is not a whole number."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._spans: list[tuple[int, int, int, str]] = []
        self._numbers = True

    def put(self, row: int, begin: int, end: int, version: str) -> None:
        self._spans.append((row, begin, end, version))
        self._numbers &= is_number(version)

    def array(self) -> Integers | Texts:
        if self._numbers:
            numbers: Integers = np.full(self._shape, NO_VERSION, np.int64)
            for row, begin, end, version in self._spans:
                numbers[row, begin:end] = int(version)
            return numbers
        longest = max(len(version) for *_, version in self._spans)
        texts: Texts = np.full(self._shape, "", f"<U{longest}")
        for row, begin, end, version in self._spans:
            texts[row, begin:end] = version
        return texts
