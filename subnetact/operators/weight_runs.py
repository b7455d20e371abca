"""A linear layer whose weight is several runs of the full one: it multiplies by each run where it is.

Views have packed copies of such slices, unless `Supernet.packs` is False. Then the module of a view has a
parameter per run of outputs and inputs, `weight_0_0`, `weight_0_1` and so on, which shares the storage of the
weight. The products follow one another in the output, those of several runs of inputs are added.
"""

from __future__ import annotations

from functools import reduce
from itertools import groupby
from operator import add
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subnetact.operators.segments import Kept


def runs_of(weight: Tensor, out: Kept, in_: Kept) -> dict[str, Tensor]:
    """Return the runs of a weight (outputs, inputs) that a subnet keeps, as slices that share its storage."""
    return {
        f"weight_{i}_{j}": weight[row : row + height, column : column + width]
        for i, (row, height) in enumerate(out.runs())
        for j, (column, width) in enumerate(in_.runs())
    }


class LinearInRuns:
    """The forward of a linear layer with the parameters of `runs_of` in the place of its weight."""

    @property
    def _grid(self: Any) -> list[list[Tensor]]:
        """The runs by their outputs, and of each by their inputs."""
        named = ((name, t) for name, t in self._parameters.items() if name.startswith("weight_"))
        rows = groupby(named, lambda one: one[0].rpartition("_")[0])
        return [[tensor for _, tensor in row] for _, row in rows]

    @property
    def weight(self) -> Tensor:
        """The weight in one piece, a copy that is made for the caller."""
        return torch.cat([torch.cat(row, 1) for row in self._grid])

    @property
    def in_one_piece(self: Any) -> dict[str, Tensor | None]:
        """The parameters of an ordinary linear layer."""
        return {"weight": self.weight, "bias": self.bias}

    def _save_to_state_dict(self: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save an ordinary linear layer, as `nn.Module.state_dict` asks for."""
        given = self.in_one_piece.items()
        found = {f"{prefix}{n}": t if keep_vars else t.detach() for n, t in given if t is not None}
        destination.update(found)

    def forward(self: Any, x: Any) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        grid = self._grid
        parts = x.split([run.shape[1] for run in grid[0]], -1)
        rows = [reduce(add, map(F.linear, parts, row)) for row in grid]
        y = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
        return y if self.bias is None else y + self.bias
