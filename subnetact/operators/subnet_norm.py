"""SubnetNorm: BatchNorm with a mean and variance per subnet, and one weight and bias for all."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from subnetact.errors import InsertError, SpecError
from subnetact.operators.actuation import Actuation, Run
from subnetact.operators.base import Operator
from subnetact.operators.layer_traits import runs_as
from subnetact.operators.segments import cut
from subnetact.operators.view_module import called_module, view_module
from subnetact.space import SizeRow

WEIGHTED_BIASED = "weighted_biased"
CUMULATIVE_UNBIASED = "cumulative_unbiased"
CALIBRATION_RULES = (WEIGHTED_BIASED, CUMULATIVE_UNBIASED)
"""How calibration averages the statistics of batches (docstring of `subnetact.calibration`)."""

_STATISTICS = ("running_mean", "running_var")
_NO_STATISTICS = dict.fromkeys((*_STATISTICS, "num_batches_tracked"))


class SubnetNorm(Operator):
    """A BatchNorm with one weight and bias for all subnets, and a mean and variance per subnet.

    `weight[:channels]` and `bias[:channels]` are shared slices. The statistics of a calibrated subnet come
    from the `NormTable` of the supernet. Other subnets use the first channels of the shared running
    statistics, which costs accuracy. BatchNorms that a description does not name become SubnetNorms with all
    channels.

    Parts:
        channels: the channels; they may be `Segments` behind a concatenation.

    Attributes:
        rule: how calibration averages the batches of this BatchNorm; one of `CALIBRATION_RULES`.

    Source:
        SuperServe, section 3.1.
    """

    slices = ("batch norm",)
    parts: tuple[str, ...] = ("channels",)
    segmented: ClassVar[tuple[str, ...]] = ("channels",)

    momentum: Any = property(attrgetter("shell.momentum"), lambda s, m: setattr(s.shell, "momentum", m))

    _begun: Any = None  # the row of the largest subnet from which training has moved shared statistics on
    rule: str = WEIGHTED_BIASED

    @property
    def num_features(self) -> int:
        """Refused with InsertError: who converts BatchNorms reads it, and puts one of a fixed size here."""
        raise InsertError(f"{self.path}: a SubnetNorm cannot be converted; convert BatchNorms before insert_")

    def reset_running_stats(self) -> None:
        """Refuse what calls it: `update_bn` would measure the statistics of one subnet only.

        Raises:
            InsertError: always; it says how statistics are measured.
        """
        call = "subnetact.calibrate(supernet, specs, batches) instead of update_bn"
        raise InsertError(f"{self.path}: every subnet has statistics of its own; call {call}")

    def check(self) -> None:
        """Refuse templates that are no BatchNorm with running statistics."""
        super().check()
        if self.template.running_mean is None:
            raise self.refuse("it keeps no running statistics (track_running_stats=False)")

    def channels(self, row: SizeRow) -> int:
        """Return the number of channels of the subnet of a size `row`, those of all segments together."""
        return self.totals(self.sizes(row))[0]

    def gather(self, row: SizeRow, full: Tensor) -> Tensor:
        """Return the channels that the subnet of a size `row` uses of `full`, of shape (full channels,).

        The result, of shape (channels,), is a slice, or a copy if it consists of segments that do not touch.
        """
        return cut(full, [(0, self.kept_parts(self.sizes(row))[0].runs())])

    def scatter_(self, row: SizeRow, full: Tensor, part: Tensor) -> None:
        """Write `part`, of shape (channels,), into the channels of `full` that the subnet of a `row` uses."""
        runs = self.kept_parts(self.sizes(row))[0].runs()
        for (start, size), values in zip(runs, torch.split(part, [size for _, size in runs]), strict=True):
            full[start : start + size] = values

    def statistics_names(self, row: SizeRow) -> tuple[str, ...]:  # noqa: ARG002
        """Return the names of the buffers with the shared statistics of the subnet of a size `row`."""
        return _STATISTICS

    def shared_statistics(self, row: SizeRow) -> tuple[Tensor, Tensor]:
        """Return the shared running mean and variance of the subnet of a size `row`, each (channels,).

        Subnets without a statistics row of their own run on them. Segments that do not touch are packed
        copies, which training does not move.
        """
        buffers: dict[str, Any] = self._buffers
        mean, var = (buffers[name] for name in self.statistics_names(row))
        sizes = self.sizes_of(row)[0] if self.checks else self.sizes(row)
        if self.segments and len(self.kept_parts(sizes)[0].runs()) > 1:
            packed = self.packed(
                ("statistics", *sizes),
                lambda: {n: self.gather(row, t) for n, t in zip(_STATISTICS, (mean, var), strict=True)},
            )
            own = [packed.frozen(name, packed.tensors[name], buffer=True) for name in _STATISTICS]
            return own[0], own[1]
        count = self.totals(sizes)[0]
        return mean.data[:count].data, var.data[:count].data

    def readable(self, row: SizeRow, measured: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return a `measured` mean and variance in the dtype in which the subnet of a size `row` reads them.

        Raises:
            SpecError: they are not finite at float16, above whose largest number statistics often are.
        """
        dtype: Any = self._buffers[self.statistics_names(row)[0]].dtype  # type: ignore[union-attr]
        if measured[0].dtype is dtype is not torch.float16:
            return measured
        mean, var = measured[0].to(dtype), measured[1].to(dtype)
        if dtype is torch.float16 and not mean.is_meta and not torch.cat((mean, var)).isfinite().all():
            raise SpecError(
                f"{self.path}: its statistics are not finite at float16: what is above 65504 overflows; "
                "use bfloat16, or keep BatchNorms at float32: "
                "`for norm in subnetact.supernet.batch_norms(supernet.network).values(): norm.float()`"
            )
        return mean, var

    def batches_tracked(self) -> Tensor | None:
        """Return the shared counter of training batches."""
        return self._buffers["num_batches_tracked"]

    def bind_with(self, row: SizeRow, mean: Tensor, var: Tensor, trainable: bool = False) -> nn.Module:
        """Return the BatchNorm of the subnet of a size `row` with a running `mean` and `var`, (channels,).

        If it is `trainable`, weight and bias carry gradients to the shared ones, and the module is in the
        training mode of the supernet.

        Raises:
            SpecError: the statistics are of another number of channels.
        """
        sizes = self.sizes(row)
        if self.checks and not mean.shape == var.shape == self.totals(sizes)[:1]:
            channels = self.totals(sizes)[0]
            raise SpecError(f"{self.path}: the subnet has {channels} channels, its statistics {mean.numel()}")
        buffers = dict(zip(_STATISTICS, (mean, var), strict=True), num_batches_tracked=self.batches_tracked())
        given = self.parameters_of(sizes, trainable)
        bound = view_module(self.shell, parameters=given, buffers=buffers, **self.attributes(sizes))
        object.__setattr__(bound, "training", trainable and self.training)
        return bound

    def bind(self, row: SizeRow, trainable: bool = False) -> nn.Module:
        """Return the BatchNorm of one subnet with the shared statistics, as `bind_with` does."""
        return self.bind_with(row, *self.shared_statistics(row), trainable=trainable)

    def module_of(self, run: Run) -> Any:
        """Return the BatchNorm of the subnet of a `run` for one call.

        In training the largest subnet moves its statistics, and a subnet with shared statistics of its own
        (`statistics_names`) moves those; others move nothing.
        """
        row, actuation = run.row, cast(Actuation, self.actuation)
        training, names = self.training, self.statistics_names(row)
        sizes, attributes = self.sizes_of(row)
        moves = training and (run.is_largest or names != self.statistics_names(actuation.largest.row))
        if training and not moves and runs_as(self.shell):
            module = called_module(self, self.tensors(sizes), dict(_NO_STATISTICS), self._modules, attributes)
            vars(module)["track_running_stats"] = False
            return module
        measured, tracked = actuation.norms.get(run.spec), self.batches_tracked()
        shared: dict[str, Any] = self._buffers
        pair = shared[names[0]], shared[names[1]]
        if not training and measured is not None and measured is not self._begun:
            pair = self.readable(row, measured.pairs()[self.path])
        elif not moves or sizes != pair[0].shape:
            pair = self.shared_statistics(row)
        if moves:
            if run.is_largest and measured not in (None, self._begun):  # Training goes on from its own.
                for tensor, own in zip(pair, self.readable(row, measured.pairs()[self.path]), strict=True):
                    tensor.copy_(own)
                self._begun = actuation.moving = measured
            increment_version(shared[names[0]])  # Torch does not count what BatchNorm writes.
        elif training:
            pair, tracked = (pair[0].clone(), pair[1].clone()), None if tracked is None else tracked.clone()
        buffers = {"running_mean": pair[0], "running_var": pair[1], "num_batches_tracked": tracked}
        return called_module(self, self.tensors(sizes), buffers, self._modules, attributes)
