"""Muon, for the model's matrices: momentum, orthogonalized.

Copying digits is what the calculator asks of the policy, and what a small transformer is slow to learn. After 500
steps on calculator episodes alone, 89 % of held-out ones are right in every token with Muon, and 9 % with AdamW at
the better of three rates.

PyTorch's own Muon calculates in bfloat16, which most CPUs are slow at; this one stays in float32 and handles matrices
of the same shape together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

# Keller Jordan's quintic: brings singular values close to 1 in five iterations (https://kellerjordan.github.io/posts/muon/).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """For two-dimensional weights other than embeddings."""

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        """`lr` is on AdamW's scale: an update's entries have a root mean square of 0.2 times it."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update from the present gradients."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for weight in group["params"]:
                by_shape[weight.shape].append(weight)
            for shape, weights in by_shape.items():
                updates = orthogonal(torch.stack([self._momentum(weight, group["momentum"]) for weight in weights]))
                size = 0.2 * max(shape) ** 0.5 * group["lr"]
                for weight, update in zip(weights, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-size)

    def _momentum(self, weight: torch.Tensor, momentum: float) -> torch.Tensor:
        """The gradient with Nesterov momentum."""
        assert weight.grad is not None
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        average: torch.Tensor = state["momentum"]
        average.mul_(momentum).add_(weight.grad)
        return weight.grad.add(average, alpha=momentum)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """For each matrix about the nearest one with orthonormal rows or columns.

    Args:
        matrices: Shape (count, rows, columns).
    """
    tall = matrices.shape[1] > matrices.shape[2]
    wide: torch.Tensor = matrices.mT if tall else matrices
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        square = wide @ wide.mT
        wide = _A * wide + (_B * square + _C * square @ square) @ wide
    return wide.mT if tall else wide
