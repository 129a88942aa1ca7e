"""NeMo RL's batch: a dictionary of columns, each a list or a tensor with one entry per sample."""

from __future__ import annotations

import copy
import sys
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeGuard, TypeVar

if TYPE_CHECKING:
    import torch

_Columns = TypeVar("_Columns")


class BatchedDataDict(UserDict[str, Any], Generic[_Columns]):
    """Columns of one batch, by name; `BatchedDataDict[DatumSpec](...)` names what they hold, for readers.

    `copy` is shallow, as a dictionary's: the columns are shared.
    """

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """Put batches together, one after the other.

        Lists and tensors of one dimension are joined. Tensors of more, `[samples, tokens, ...]`, are padded on the
        right to the longest and then joined.

        Args:
            batches: All with the same columns; one without any has no samples.
            pad_value_dict: What a column is padded with, where that is not 0.

        Raises:
            KeyError: A batch lacks a column that another one has.
            NotImplementedError: A column is neither of lists nor of tensors with a dimension.
        """
        pad_values = pad_value_dict or {}
        filled = [batch for batch in batches if batch]
        joined = cls()
        for name in sorted({name for batch in filled for name in batch}):
            joined[name] = _join(name, [batch[name] for batch in filled], pad_values.get(name, 0))
        return joined

    @property
    def size(self) -> int:
        """Samples in the batch, as its first column says."""
        return next((len(column) for column in self.data.values()), 0)

    def get_dict(self) -> dict[str, Any]:
        """The columns themselves, as a plain dictionary."""
        return self.data

    def to(self, device: str | torch.device) -> Self:
        """Move the tensors to a device, in place."""
        for name, column in self.data.items():
            if _is_tensor(column):
                self.data[name] = column.to(device)
        return self

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """A batch of some samples, in this order; entries of lists are shared with this one.

        Args:
            indices: Numbers of samples, or a tensor of booleans, one for each sample.

        Raises:
            TypeError: A column is neither a list nor a tensor.
        """
        if _is_mask(indices):
            indices = indices.nonzero().flatten()
        selected = type(self)()
        for name, column in self.data.items():
            if not _is_tensor(column) and not isinstance(column, list):
                raise TypeError(
                    f"column {name!r} is a {type(column).__name__}; samples are selected of lists and tensors"
                )
            selected[name] = _rows(column, indices)
        return selected

    def slice(self, start: int, end: int) -> Self:
        """The samples from `start` up to `end`, exclusive.

        Raises:
            AssertionError: A tensor has fewer.
        """
        part = type(self)()
        for name, column in self.data.items():
            assert not _is_tensor(column) or end <= len(column), (
                f"column {name!r} has {len(column)} samples; there is no slice {start}:{end}"
            )
            part[name] = column[start:end]
        return part

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Repeat each sample `num_repeats` times: `[a, b]` becomes `[a, a, b, b]`; repeated entries share nothing."""
        repeated = type(self)()
        for name, column in self.data.items():
            if _is_tensor(column):
                repeated[name] = column.repeat_interleave(num_repeats, dim=0)
            else:
                repeated[name] = [copy.deepcopy(entry) for entry in column for _ in range(num_repeats)]
        return repeated

    def reorder_data(self, reorded_indices: Sequence[int]) -> None:
        """Bring the samples into the order of the numbers given for them, in place."""
        order = sorted(range(self._common_size()), key=lambda row: reorded_indices[row])
        for name, column in self.data.items():
            self.data[name] = _rows(column, order)

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut every tensor that has this dimension to a length, in place."""
        for name, column in self.data.items():
            if _is_tensor(column) and column.dim() > dim:
                self.data[name] = column.narrow(dim, 0, truncated_len)

    def chunk(self, rank: int, chunks: int) -> Self:
        """The part number `rank` of equally many samples each.

        Raises:
            AssertionError: The samples cannot be divided so, or there is no such part.
        """
        size = self._common_size()
        assert size % chunks == 0, f"batch size ({size}) is not a multiple of chunks ({chunks})"
        assert 0 <= rank < chunks, f"there is no chunk {rank} of {chunks}"
        length = size // chunks
        return self._own_rows(range(rank * length, (rank + 1) * length))

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: Any = None,
        sequence_packing_args: Any = None,
    ) -> list[Self]:
        """Divide each `batch_size` samples evenly among the shards: with 2 shards of `AABBCCDD` by 2, both are `ABCD`.

        Args:
            batch_size: None: all samples.
            allow_uneven_shards: The last shards may be smaller; not together with `batch_size`.

        Raises:
            AssertionError: The samples cannot be divided so.
            NotImplementedError: Dynamic batching and packing are the trainer's.
        """
        if dynamic_batching_args is not None or sequence_packing_args is not None:
            raise NotImplementedError("dynamic batching and sequence packing are done by NeMo RL's own BatchedDataDict")
        total = self._common_size()
        assert not (allow_uneven_shards and batch_size is not None), "batch_size excludes allow_uneven_shards"
        size = total if batch_size is None else batch_size
        assert size > 0, "an empty batch has no shards"
        assert total % size == 0, f"Total batch size ({total}) is not a multiple of batch_size ({size})"
        assert allow_uneven_shards or size % shards == 0, f"Batch size ({size}) is not a multiple of shards ({shards})"
        length = -(-size // shards)
        return [
            self._own_rows(
                [
                    row
                    for first in range(0, total, size)
                    for row in range(first, first + size)[shard * length : (shard + 1) * length]
                ]
            )
            for shard in range(shards)
        ]

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[Self]:
        """Iterate over slices of `microbatch_size` samples.

        Raises:
            AssertionError: The samples cannot be divided so.
        """
        assert self.size % microbatch_size == 0, (
            f"Data dict size ({self.size}) is not a multiple of the provided microbatch size ({microbatch_size})"
        )
        for start in range(0, self.size, microbatch_size):
            yield self.slice(start, start + microbatch_size)

    def get_multimodal_dict(self, as_tensors: bool = False, device: Any = None) -> dict[str, Any]:  # noqa: ARG002
        """Nothing: batches are of text."""
        return {}

    def _common_size(self) -> int:
        sizes = {len(column) for column in self.data.values()}
        assert len(sizes) <= 1, (
            f"Batch sizes are not the same across the rollout batch, found sizes: {', '.join(map(str, sorted(sizes)))}"
        )
        return self.size

    def _own_rows(self, rows: Sequence[int]) -> Self:
        part = type(self)()
        for name, column in self.data.items():
            part[name] = _rows(column, list(rows))
        return part


def batch_class(example: Any = None) -> type[Any]:
    """The class of batches to make, so that what gets them recognizes them.

    NeMo RL's policies and trainers look at the class of a batch: where the caller's is a batch class of its own, or
    NeMo RL is loaded, that class is taken, else ours.
    """
    if hasattr(type(example), "from_batches") and hasattr(type(example), "select_indices"):
        return type(example)
    loaded = sys.modules.get("nemo_rl.distributed.batched_data_dict")
    return BatchedDataDict if loaded is None else loaded.BatchedDataDict


def _is_tensor(value: Any) -> bool:
    # Without torch loaded there is no tensor.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_mask(indices: Any) -> TypeGuard[torch.Tensor]:
    return _is_tensor(indices) and indices.dtype is sys.modules["torch"].bool


def _rows(column: Any, indices: Any) -> Any:
    if _is_tensor(column):
        import torch

        # torch reads an empty list as one of floats, which are no indices.
        return column[torch.as_tensor(indices, dtype=torch.int64, device=column.device)]
    return [column[int(index)] for index in indices]


def _join(name: str, columns: list[Any], pad_value: float) -> Any:
    if all(isinstance(column, list) for column in columns):
        return [entry for column in columns for entry in column]
    if not all(_is_tensor(column) and column.dim() >= 1 for column in columns):
        kinds = ", ".join(sorted({type(column).__name__ for column in columns}))
        raise NotImplementedError(
            f"column {name!r} is of {kinds}; only lists, and tensors with a dimension, can be put together"
        )
    import torch

    if columns[0].dim() == 1:
        return torch.cat(columns)
    longest = max(column.shape[1] for column in columns)
    features = (0, 0) * (columns[0].dim() - 2)
    return torch.cat(
        [
            torch.nn.functional.pad(column, (*features, 0, longest - column.shape[1]), value=pad_value)
            for column in columns
        ]
    )
