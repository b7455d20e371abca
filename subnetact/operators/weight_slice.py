"""WeightSlice: the first channels of a convolution, the first features of a linear layer or an embedding.

The slicing rule is `weight[:out, :in_]` and `bias[:out]`, or `weight[:in_, :out]` for modules that store the
inputs first: transposed convolutions, embeddings and the `Conv1D` of Hugging Face.

Grouped convolutions keep the number of channels per group and lose whole groups. With G groups of
`in_channels / G` inputs and `out_channels / G` outputs, a subnet with g of the G groups uses
`weight[: g * out_channels / G]` with all columns, because the second axis of the weight is the inputs of one
group. A depthwise convolution (one channel per group) therefore keeps its first channels. The number of
outputs decides the number of inputs and the other way round, so only one of `out` and `in_` needs a
dimension. A grouped transposed convolution uses `weight[: g * in_channels / G]` in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from subnetact.operators.base import Elastic, Operator
from subnetact.space import SizeRow

__all__ = ["WeightSlice"]


@dataclass(frozen=True)
class _Layout:
    """Where a class of modules keeps the sizes that a slice changes.

    Attributes:
        out: the attribute with the number of outputs.
        in_: the attribute with the number of inputs.
        inputs_first: whether the first axis of the weight is the inputs. Otherwise it is the outputs.
    """

    out: str
    in_: str
    inputs_first: bool = False


_LAYOUTS: Mapping[type[nn.Module], _Layout] = {
    nn.Linear: _Layout("out_features", "in_features"),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _Layout("out_channels", "in_channels")),
    **dict.fromkeys(
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        _Layout("out_channels", "in_channels", inputs_first=True),
    ),
    nn.Embedding: _Layout("embedding_dim", "num_embeddings", inputs_first=True),
}
_HUGGING_FACE_CONV1D = _Layout("nf", "nx", inputs_first=True)


def _layout(module: nn.Module) -> _Layout | None:
    for cls in type(module).__mro__:
        if cls in _LAYOUTS:
            return _LAYOUTS[cls]
        if (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D"):
            return _HUGGING_FACE_CONV1D
    return None


class WeightSlice(Operator):
    """Slices `weight[:out, :in_]` and `bias[:out]` of a convolution, a linear layer or an embedding.

    It covers `nn.Conv1d` to `nn.Conv3d`, `nn.ConvTranspose1d` to `nn.ConvTranspose3d`, `nn.Linear`,
    `nn.Embedding` (the outputs are its columns) and the `Conv1D` of Hugging Face's transformers. How grouped
    convolutions are sliced is said at the top of this file: they lose whole groups.

    Source:
        SuperServe, section 3.1. Every published family slices in this way.
    """

    parts = ("out", "in_")

    @classmethod
    def on(cls, *, out: str | None = None, in_: str | None = None, **others: str) -> Elastic:
        """Describe an elastic convolution, linear layer or embedding, for `insert_`.

        Args:
            out: the dimension that gives the number of output channels or features. If None, all are kept.
            in_: the dimension that gives the number of input channels or features. If None, all are kept.
                For a grouped convolution one of `out` and `in_` implies the other. An embedding has no
                elastic inputs, because every row belongs to one index.
            others: parts that this operator does not have; `insert_` refuses them.
        """
        return cls._described(out=out, in_=in_, **others)

    def check(self) -> None:
        """Check that the template has a weight that can be sliced, and that grouped sides agree.

        Raises:
            InsertError: the template is another module, has parameters beside `weight` and `bias`, is an
                embedding with elastic inputs, or is a grouped convolution whose inputs and outputs follow
                different dimensions.
        """
        if _layout(self.template) is None:
            raise self.refuse(
                "only Conv1d, Conv2d, Conv3d and Linear, transposed convolutions, Embedding and Conv1D of "
                "transformers have a weight it can slice"
            )
        extra = [n for n, p in self._parameters.items() if p is not None and n not in ("weight", "bias")]
        if extra:
            raise self.refuse(f"it slices weight and bias, and has no rule for {', '.join(extra)}")
        if isinstance(self.template, nn.Embedding) and "in_" in self.dims:
            raise self.refuse("every row of an embedding belongs to one index; only 'out' can be elastic")
        if self._groups > 1:
            out, in_ = self.dims.get("out"), self.dims.get("in_")
            if out is not None and in_ is not None and out != in_ and self.full("out") == self.full("in_"):
                raise self.refuse("the inputs and outputs of a grouped convolution follow one dimension")

    @property
    def _groups(self) -> int:
        return int(getattr(self.template, "groups", 1))

    @property
    def _layout(self) -> _Layout:
        found = _layout(self.template)
        if found is None:
            raise self.refuse("it has no weight that can be sliced")
        return found

    def legal(self, part: str) -> Sequence[int]:
        """Return every legal number of channels: multiples of the channels of one group."""
        each = self.full(part) // self._groups if self._groups > 1 else 1
        return range(each, self.full(part) + 1, each)

    def silent(self, part: str) -> bool:  # noqa: ARG002
        """Return True for PyTorch's own forwards; another one may normalise weights or order outputs anew."""
        return type(self.template).forward.__module__.startswith("torch.nn.")

    def full(self, part: str) -> int:
        """Return the number of output or input channels (or features) of the full network."""
        name = self._layout.out if part == "out" else self._layout.in_
        if name in self.template.__dict__:
            return int(getattr(self.template, name))
        axis = int((part == "in_") != self._layout.inputs_first)  # Conv1D has no nx in older transformers
        return int(self.template.weight.shape[axis])

    def sizes(self, row: SizeRow) -> tuple[int, ...]:
        """Return (out, in_) of a subnet. In a grouped convolution one of them implies the other.

        Raises:
            SpecError: a size is not legal.
            InsertError: the channels are not whole groups.
        """
        out, in_ = self.size("out", row), self.size("in_", row)
        if self._groups > 1:
            per_out, per_in = self.full("out") // self._groups, self.full("in_") // self._groups
            groups = out // per_out if "out" in self.dims else in_ // per_in
            sliced = groups * per_out, groups * per_in
            whole = not self.checks or all(
                s == n for s, n, p in zip(sliced, (out, in_), self.parts, strict=True) if p in self.dims
            )
            if not whole:
                raise self.refuse(f"{out} x {in_} channels are not whole groups of {per_out} x {per_in}")
            return sliced
        return out, in_

    def tensors(self, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return `weight` and `bias` of the first `out` outputs and `in_` inputs."""
        out, in_ = sizes
        weight: Any = self.weight
        rows, columns = (in_, out) if self._layout.inputs_first else (out, in_)
        if self._groups > 1:
            columns = weight.shape[1]
        found: dict[str, Tensor | None] = {"weight": weight[:rows, :columns]}
        if "bias" in self._parameters:
            bias: Any = self.bias
            found["bias"] = None if bias is None else bias[:out]
        return found

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the channel counts (and groups) of the subnet's module."""
        out, in_ = sizes
        found = {self._layout.out: out, self._layout.in_: in_}
        if "groups" in self.template.__dict__:
            found["groups"] = self._groups * out // self.full("out") if self._groups > 1 else 1
        return found
