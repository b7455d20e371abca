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
from subnetact.operators.precision import LowConv, LowConv1D, LowLinear
from subnetact.operators.segments import Kept, Segments, cut
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

    slices = ("convolution", "transposed convolution", "linear", "embedding")
    parts = ("out", "in_")
    segmented = ("out", "in_")

    @classmethod
    def on(
        cls, *, out: str | Segments | None = None, in_: str | Segments | None = None, **others: Any
    ) -> Elastic:
        """Describe an elastic convolution, linear layer or embedding, for `insert_`.

        Args:
            out: the dimension that gives the number of output channels or features, or the `Segments` of a
                fused layer. If None, all are kept.
            in_: the dimension that gives the number of input channels or features, or `Segments` behind a
                concatenation. If None, all are kept.
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
        if isinstance(self.template, nn.Embedding) and self._followed("in_"):
            raise self.refuse("every row of an embedding belongs to one index; only 'out' can be elastic")
        if self._groups > 1:
            out, in_ = self._followed("out"), self._followed("in_")
            if out and in_ and out != in_ and self.full("out") == self.full("in_"):
                raise self.refuse("the inputs and outputs of a grouped convolution follow one dimension")
            for part in self.parts:
                if any(length % self._each(part) for length in self.lengths(part)):
                    raise self.refuse(f"the segments of {part!r} are not whole groups of {self._each(part)}")

    def _followed(self, part: str) -> list[int | None]:
        """Return the position of the dimension of every segment; an empty list if no segment has one."""
        dims = [self.dims.get(name) for name in self.names(part)]
        return dims if any(dim is not None for dim in dims) else []

    def _each(self, part: str) -> int:
        """Return the channels of one group; 1 if there are no groups."""
        return self.full(part) // self._groups if self._groups > 1 else 1

    def lengths(self, part: str) -> tuple[int, ...]:
        """Return the full lengths of the segments; both sides of a grouped convolution have the same ones."""
        other = self.parts[part == "out"]
        if self._groups > 1 and part not in self.segments and other in self.segments:
            return tuple(n // self._each(other) * self._each(part) for n in self.segments[other])
        return super().lengths(part)

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
        each = self._each(part.partition(".")[0]) if self._groups > 1 else 1
        return range(each, self.length(part) + 1, each)

    def zeroing_equals_dropping(self, part: str) -> bool:  # noqa: ARG002
        """Return True for known forwards; another one may normalise weights or order outputs anew."""
        if type(self.template).forward.__module__ == "transformers.pytorch_utils":
            return True
        return str(type(self.template).forward.__module__).startswith("torch.nn.")

    def full(self, part: str) -> int:
        """Return the number of output or input channels (or features) of the full network."""
        name = self._layout.out if part == "out" else self._layout.in_
        if name in self.template.__dict__:
            return int(getattr(self.template, name))
        axis = int((part == "in_") != self._layout.inputs_first)  # Conv1D has no nx in older transformers
        return int(self.template.weight.shape[axis])

    def sizes(self, row: SizeRow) -> tuple[int, ...]:
        """Return (out, in_) of a subnet, per segment. In a grouped convolution one implies the other.

        Raises:
            SpecError: a size is not legal.
            InsertError: the channels are not whole groups.
        """
        given = super().sizes(row)
        if self._groups == 1:
            return given
        sides = dict(zip(self.parts, self.kept_parts(given), strict=True))
        leading = "out" if self._followed("out") else "in_"
        groups = [size // self._each(leading) for size in sides[leading].sizes]
        found = {part: tuple(n * self._each(part) for n in groups) for part in self.parts}
        whole = not self.checks or all(
            found[part] == sides[part].sizes for part in self.parts if self._followed(part)
        )
        if not whole:
            raise self.refuse(
                f"{sides['out'].total} x {sides['in_'].total} channels are not whole groups of "
                f"{self._each('out')} x {self._each('in_')}"
            )
        return found["out"] + found["in_"]

    def sliced(self, sizes: tuple[int, ...], given: Mapping[str, Any]) -> dict[str, Tensor | None]:
        """Return `weight` and `bias` of the first `out` outputs and `in_` inputs, per segment."""
        out, in_ = self.kept_parts(sizes)
        weight: Any = given["weight"]
        rows, columns = (in_, out) if self._layout.inputs_first else (out, in_)
        if self._groups > 1:
            columns = Kept((weight.shape[1],), (weight.shape[1],))
        found: dict[str, Tensor | None] = {"weight": cut(weight, {0: rows, 1: columns})}
        if "bias" in given:
            bias: Any = given["bias"]
            found["bias"] = None if bias is None else cut(bias, {0: out})
        return found

    def mixin(self) -> type | None:
        """Return the forward at a lower precision of a linear layer, a convolution or a `Conv1D`."""
        module: Any = self.template
        forward = type(module).forward
        if isinstance(module, nn.Linear):
            return LowLinear if forward is nn.Linear.forward else None
        if isinstance(module, nn.Conv2d):
            own = forward is nn.Conv2d.forward and type(module)._conv_forward is nn.Conv2d._conv_forward
            unpadded = not any(module._reversed_padding_repeated_twice)
            fits = module.groups == 1 and (unpadded or module.padding_mode == "zeros")
            return LowConv if own and fits else None
        known = forward.__module__ == "transformers.pytorch_utils" and not isinstance(module, nn.Embedding)
        return LowConv1D if known else None

    def out_axis(self) -> int:
        """Return 1 for modules that store the inputs first, otherwise 0."""
        return int(self._layout.inputs_first)

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the channel counts (and groups) of the subnet's module."""
        out, in_ = self.totals(sizes)
        found = {self._layout.out: out, self._layout.in_: in_}
        if "groups" in self.template.__dict__:
            found["groups"] = self._groups * out // self.full("out") if self._groups > 1 else 1
        return found
