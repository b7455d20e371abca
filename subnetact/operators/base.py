"""Operator: an elastic module. Elastic: one entry of a description of elastic modules.

How to write an operator
------------------------
An operator holds the parameters of the module that it replaces, its template, and says how the module of one
subnet is sliced out of them. Where the table of layer traits names the axes and the sizes of a layer, that is
the slicing rule, and little is left to say:

    class BilinearSlice(Operator):
        parts = ("out",)
        slices = ("bilinear",)

    axes, sizes = {"weight": ("out",), "bias": ("out",)}, {"out": "out_features"}
    register_layer(nn.Bilinear, LayerTraits("bilinear", axes, sizes, operator=BilinearSlice))

`BilinearSlice.on(out="width")` describes such a layer for `insert_`, and `describe` uses the operator for it.
A class that is only defined changes no model; `Description.override` chooses it. Files name an own operator
by its module and class, which must be imported before they are read. Where the table does not say it all, an
operator overrides methods of the contract below. Everything that `tensors` and `attributes` return must
depend on `sizes` alone, because subnets of equal sizes share their tensors, and training needs gradients
through `tensors`. The forward is that of the template's class, or of `self.__dict__["_shell"]` if it is set.

What `tensors` returns by slicing shares the storage of the parameters and costs no memory. Any other tensor
(concatenated, gathered, normalised, multiplied) becomes a packed copy in views: it takes memory once per
distinct sizes, and follows changes in place by itself (`packed_copy.py`; linear layers can do without,
`weight_runs.py`). Changes that version counters do
not show (through `parameter.data`, `set_`, NumPy, or on tensors that were made in inference mode) need
`Supernet.refresh`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, ClassVar

from torch import Tensor, nn

from subnetact.errors import InsertError, SpecError
from subnetact.operators.actuation import Actuation, Run, in_forward
from subnetact.operators.layer_traits import traits_of
from subnetact.operators.lowered_weight import FLOAT_BITS, Low, LoweredWeight, sliced_low
from subnetact.operators.outside_modes import outside_modes
from subnetact.operators.packed_copy import PackedCopy, follow_, frozen_parameter
from subnetact.operators.segments import Kept, Runs, Segments, cut
from subnetact.operators.tensor_version import storage_id
from subnetact.operators.view_module import HOOKS, called_module, view_module
from subnetact.operators.weight_runs import LinearInRuns
from subnetact.space import SizeRow


@dataclass(frozen=True)
class Elastic:
    """One entry of an elastic description; `WeightSlice.on(out="width")` makes one.

    Attributes:
        operator: the class of the operator that replaces the module.
        follows: part of the operator -> dimension of the space that gives the part its size, or the segments
            of the part.
    """

    operator: type[Operator]
    follows: Mapping[str, str | Segments]

    def dimensions(self) -> dict[str, str]:
        """Return the dimensions by part, or by segment of a part: `out`, or `out.0`, `out.1` and so on."""
        found: dict[str, str] = {}
        for part, follows in self.follows.items():
            found.update(follows.named(part) if isinstance(follows, Segments) else {part: follows})
        return found

    def segments(self) -> dict[str, tuple[int, ...]]:
        """Return the full lengths of the segments of every part that has `Segments`."""
        return {part: given.lengths for part, given in self.follows.items() if isinstance(given, Segments)}

    def __str__(self) -> str:
        return f"{self.operator.__name__}({', '.join(f'{k}={v}' for k, v in self.follows.items())})"


OWN_SLICERS: dict[str, type[Operator]] = {}
"""The operators of the library by the kinds of layers that they slice; `operators/__init__.py` lists them."""


def slicer_of(layer: nn.Module) -> type[Operator] | None:
    """Return the operator that slices a layer if a description names no other; None if there is none."""
    traits = traits_of(layer)
    return traits.operator or OWN_SLICERS.get(traits.kind)


class ReadThrough(nn.Module):
    """A module with the tensors and submodules of another one, whose other attributes are read through."""

    _behind: ClassVar = "template"  # the attribute that is the other module, past torch's registration

    def _hold(self, module: nn.Module) -> None:
        """Take the tensors and submodules of a module over, under the names that they have there."""
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"):
            self.__dict__[name] = module.__dict__[name]
        self.__dict__[self._behind] = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or not hasattr(self.__dict__.get(self._behind), name):
                raise
        return getattr(self.__dict__[self._behind], name)


_OF_CLASSES = ("__dict__", "__weakref__")


class Operator(ReadThrough):
    """An elastic module: it holds full-size parameters and slices the module of any subnet out of them.

    Subnets of equal `sizes` share their tensors. The text at the top of this file says how to write one.

    Args:
        template: the ordinary module; its parameters are taken over, not copied.
        path: the name of the module in the network.
        dims: part, or segment of a part -> position in the size row that gives it its size. What is not
            named keeps its full size.
        segments: part -> the full lengths of its segments, which are named `out.0`, `out.1` and so on. Parts
            that are not named are one segment, with the name of the part.

    Attributes:
        parts: the names of the parts that a description may name. If empty, the template decides which are
            legal.
        slices: the kinds of layers (`LayerTraits.kind`) that this operator slices. If empty, it decides in
            `check`.
        segmented: those of `parts` that a description may give as `Segments`.
        traits: what the table of layer traits says of the template.
        shapes: the shapes of its parameters by name, which are not known from the parameters in a trace.
        precision_dim: the position in the size row of the bits of the weight. If None, it stays as it is in
            every subnet.
        packs: whether slices of linear layers in several runs become packed copies (`Supernet.packs`).
        actuation: what says which subnet runs when the network is called; None outside of supernets. With
            it, the operator is in the place of its template, so that other attributes are those of that.
        checks: whether sizes are compared with the legal ones. Export switches this off to trace symbolic
            sizes.
    """

    parts: tuple[str, ...] = ()
    slices: ClassVar[tuple[str, ...]] = ()
    segmented: ClassVar[tuple[str, ...]] = ()
    precision_dim: int | None = None
    packs: bool = True
    template: Any
    actuation: Actuation | None = None
    checks: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse to make an operator of a description, as in `WeightSlice(out="width")`."""
        template = args[0] if args else kwargs.get("template")
        if (args or kwargs) and not isinstance(template, nn.Module):
            name = cls.__name__
            raise InsertError(f"{name}(...) is made by insert_; describe a module with {name}.on(...)")
        return super().__new__(cls)

    def __init__(
        self,
        template: nn.Module,
        path: str,
        dims: Mapping[str, int],
        segments: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__()
        self._hold(template)
        self.__dict__.update({name: template.__dict__[name] for name in HOOKS})
        del self.__dict__["_is_full_backward_hook"]  # It is that of the template, too.
        self.path = path
        self.dims = dict(dims)
        self.segments = dict(segments or {})
        self.traits = traits_of(template)
        self.shapes = {name: tuple(p.shape) for name, p in template._parameters.items() if p is not None}
        self._shared: dict[tuple[int, tuple[int, ...]], dict[str, Tensor | None]] = {}
        self._packed: dict[tuple[Any, ...], PackedCopy] = {}
        self._key: Any = itemgetter(*self.dims.values()) if dims else itemgetter(slice(0))
        self._sizes: dict[Any, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self._runs: dict[tuple[int, ...], dict[str, Runs]] = {}

    @classmethod
    def on(cls, **follows: str | Segments | None) -> Elastic:
        """Describe an elastic module, for `insert_`.

        Args:
            follows: part -> the dimension that gives the part its size, or its `Segments`. The text of the
                class has the parts. A part that is not named, or is None, keeps its full size.

        Returns:
            An entry of an elastic description.

        Example:
            >>> elastic = {"stage1.0.conv": WeightSlice.on(out="stage1.width")}
        """
        return Elastic(cls, {part: dimension for part, dimension in follows.items() if dimension is not None})

    @property
    def shell(self) -> Any:
        """The module whose class and settings a subnet's has: `_shell` if it is set, or the template."""
        return self.__dict__.get("_shell", self.template)

    # -- the contract ----------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what this operator cannot make elastic; it runs before a network is changed.

        Raises:
            InsertError: the operator does not support the template's type or settings, or the given parts.
        """
        if self.slices and self.traits.kind not in self.slices:
            kinds = ", ".join(self.slices)
            raise self.refuse(f"it slices layers of the kind {kinds}; register_layer adds one")
        for part, lengths in self.segments.items():
            each = self.group_size(part)
            if any(length % each for length in lengths):
                raise self.refuse(f"the segments of {part!r} are not whole groups of {each}")

    def full(self, part: str) -> int:
        """Return the size of a part, one of `parts`, in the full network."""
        return int(getattr(self.template, self.traits.sizes[part]))

    def group_size(self, part: str) -> int:  # noqa: ARG002
        """Return how many entries of a `part` are kept or dropped together, as in a grouped convolution."""
        return 1

    def legal(self, part: str) -> Sequence[int]:
        """Return the sizes that a part, or a segment of a part, may have, in ascending order."""
        each = self.group_size(part.partition(".")[0] if self.segments else part)
        return range(each, self.length(part) + 1, each)

    def zeroing_equals_dropping(self, part: str) -> bool:  # noqa: ARG002
        """Tell whether the module with zeros in place of dropped weights computes what the narrowed one does.

        It does not if it normalises over the `part` or computes its weights. `insert_` refuses what it
        cannot compare therefore, and `Supernet.check` reports it.
        """
        return True

    def resized_in_reference(self, part: str) -> bool:  # noqa: ARG002
        """Tell whether the full network with zeros, to which a subnet is compared, has the subnet's `part`.

        That is so for what zeros do not stand for, as skipped layers, and which is proved in another way.
        """
        return False

    def sizes(self, row: SizeRow) -> tuple[int, ...]:
        """Return what the module of the subnet of a size `row` depends on: the size of every part in order.

        A part that is described with `Segments` has one size per segment.
        """
        if not self.segments:
            return tuple([self.size(part, row) for part in self.parts])
        return tuple([self.size(name, row) for part in self.parts for name in self.names(part)])

    def tensors(self, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return the parameters of the subnets of these `sizes`, which carry gradients to the full ones.

        They have the template's names; those that it lacks are None.
        """
        return self.sliced(sizes, self._parameters)

    def sliced(self, sizes: tuple[int, ...], given: Mapping[str, Any]) -> dict[str, Tensor | None]:
        """Return what `tensors` does for these `sizes`, of `given` tensors in place of the parameters.

        An operator whose weight can have a lower precision overrides this method instead of `tensors`: here
        its rule meets the lowered copy of the weight, and the scales in place of the bias.
        """
        known = self._runs.setdefault(sizes, {}) if self.checks else {}  # Symbolic sizes are new every time.
        sliced: dict[str, Tensor | None] = {}
        for name, tensor in given.items():
            if (runs := known.get(name)) is None:
                kept = dict(zip(self.parts, self.kept_parts(sizes), strict=True))
                sides = {i: kept[part] for i, part in enumerate(self.axes(name)) if part in kept}
                narrow = {i: k.runs() for i, k in sides.items() if not (self.checks and k.sizes == k.lengths)}
                runs = known[name] = sorted(narrow.items(), key=lambda item: len(item[1]))
            sliced[name] = cut(tensor, runs) if runs and tensor is not None else tensor
        return sliced

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the part that each of the first axes of the parameter of a `name` belongs to."""
        return self.traits.axes.get(name, ())

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the plain attributes in which the module of a subnet of these `sizes` differs, by name."""
        totals = dict(zip(self.parts, self.totals(sizes), strict=False))
        return {attribute: totals[part] for part, attribute in self.traits.sizes.items() if part in totals}

    def low_mixin(self) -> type[Low] | None:
        """Return the class with the forward of the module at a lower precision, or None if it has none."""
        return None

    # -- parts and segments ----------------------------------------------------------------------

    def lengths(self, part: str) -> tuple[int, ...]:
        """Return the full lengths of the segments of a `part`; one length if none are described."""
        return self.segments.get(part) or (self.full(part),)

    def names(self, part: str) -> tuple[str, ...]:
        """Return the names of the segments of a part: the part itself, or `out.0`, `out.1` and so on."""
        count = len(self.lengths(part))
        if part not in self.segments and count == 1:
            return (part,)
        return tuple(f"{part}.{i}" for i in range(count))

    def length(self, name: str) -> int:
        """Return the size of the part or segment of this `name` in the full network."""
        if not self.segments or name in self.parts:
            return self.full(name)
        part, _, index = name.rpartition(".")
        return self.lengths(part)[int(index)]

    def size(self, part: str, row: SizeRow) -> int:
        """Return the size of a `part`, or of a segment of one, in the subnet of a size `row`.

        Raises:
            SpecError: the size is not among the `legal` ones.
        """
        if part not in self.dims:
            return self.length(part)
        size = row[self.dims[part]]
        if self.checks and size not in (legal := self.legal(part)):
            among = ", ".join(map(str, legal))
            if isinstance(legal, range):
                among = f"{legal[0]} to {legal[-1]}" + f" in steps of {legal.step}" * (legal.step > 1)
            raise SpecError(f"{self.path}: {part}={size} is not legal; choose from {among}")
        return size

    def totals(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return one size per part, that of all its segments together, of what `sizes` returned."""
        return tuple(kept.total for kept in self.kept_parts(sizes)) if self.segments else sizes

    def kept_parts(self, sizes: tuple[int, ...]) -> tuple[Kept, ...]:
        """Return what a subnet keeps of every part, for `cut`, given what `sizes` returned."""
        left = iter(sizes)
        lengths = [self.lengths(part) for part in self.parts]
        return tuple([Kept(segments, tuple(islice(left, len(segments)))) for segments in lengths])

    # -- the module of a subnet ------------------------------------------------------------------

    def bind(self, row: SizeRow, trainable: bool = False) -> nn.Module:
        """Return the ordinary module of the subnet of a size `row`, which shares this operator's storage.

        If it is `trainable`, its parameters carry gradients to those of this operator.

        Raises:
            SpecError: a size in the row is not legal.
        """
        sizes, dim = self.sizes(row), self.precision_dim
        bits = FLOAT_BITS if trainable or dim is None else row[dim]
        low = None if bits == FLOAT_BITS else self.low_mixin()
        given = self.parameters_of(sizes, trainable, FLOAT_BITS if low is None else bits)
        mixin = LinearInRuns if "weight_0_0" in given else low
        buffers, attributes = self._buffers_of(sizes), self.attributes(sizes)
        return view_module(self.shell, parameters=given, buffers=buffers, mixin=mixin, **attributes)

    def _buffers_of(self, sizes: tuple[int, ...]) -> Any:
        """Return the buffers of the subnets of these `sizes`: their registry if no axis follows a part."""
        follows = any(any(self.axes(name)) for name in self._buffers)
        return self.sliced(sizes, self._buffers) if follows else self._buffers

    def parameters_of(
        self, sizes: tuple[int, ...], trainable: bool, bits: int = FLOAT_BITS
    ) -> dict[str, Any]:
        """Return the parameters of the subnets of these `sizes`, which share them.

        They are frozen, with the weight at a precision of `bits`. If they are `trainable`, they are new
        slices that carry gradients to the full parameters.
        """
        if trainable:
            return self.tensors(sizes)
        found = self._shared.get((bits, sizes))
        if found is None:
            found = self._shared.setdefault((bits, sizes), self._frozen(sizes, bits))
        elif self._packed:
            follow_(found)
        return found

    def view_tensors(self, sizes: tuple[int, ...], bits: int) -> dict[str, Tensor | None]:
        """Return the tensors of views of these `sizes` and `bits`, which may be slices of packed copies."""
        return self.tensors(sizes) if bits == FLOAT_BITS else sliced_low(self, sizes, bits)

    @outside_modes()
    def _frozen(self, sizes: tuple[int, ...], bits: int) -> dict[str, Tensor | None]:
        """Return the frozen parameters of these sizes: slices in place, and packed copies of the rest."""
        given = self.view_tensors(sizes, bits)
        own = {storage_id(t) for t in (*self.parameters(), *self.buffers())}
        copies = {storage_id(t): (p, name) for p in self.packed_copies() for name, t in p.tensors.items()}
        apart = {n for n, t in given.items() if t is not None and storage_id(t) not in own | copies.keys()}
        if apart:

            def make() -> dict[str, Tensor | None]:
                return {n: t for n, t in self.view_tensors(sizes, bits).items() if n in apart}

            packed = self.packed(("sizes", bits, sizes), make)
            given = {**given, **packed.tensors}
            copies |= {storage_id(t): (packed, name) for name, t in packed.tensors.items()}

        def frozen(tensor: Tensor) -> Tensor:
            copy, name = copies.get(storage_id(tensor), (None, ""))
            return frozen_parameter(tensor) if copy is None else copy.frozen(name, tensor)

        return {name: None if t is None else frozen(t) for name, t in given.items()}

    # -- packed copies ---------------------------------------------------------------------------

    def packed(self, key: tuple[Any, ...], make: Callable[[], Mapping[str, Tensor | None]]) -> PackedCopy:
        """Return the one packed copy of a `key`, as it should be now; `make` computes its tensors by name."""
        found = self._packed.get(key)
        if found is None:
            found = self._packed.setdefault(key, PackedCopy((*self.parameters(), *self.buffers()), make))
        found.refresh()
        return found

    def lowered(self, bits: int) -> PackedCopy:
        """Return the one copy of the full weight at 8 or 16 `bits`, with the fields of a `LoweredWeight`."""
        mixin: Any = self.low_mixin()
        name = mixin.reads[0]
        axes: Any = self.axes(name)
        channels = axes.index("out") if "out" in axes else 0

        def make() -> Mapping[str, Tensor | None]:
            weight: Any = self._parameters[name]
            return LoweredWeight.made(weight, bits, channels, self.path)._asdict()

        return self.packed(("lowered", bits), make)

    def packed_copies(self, kind: str = "") -> list[PackedCopy]:
        """Return the packed copies that views may be using now: all, or those of a `kind`, as "lowered"."""
        return [packed for key, packed in list(self._packed.items()) if kind in ("", key[0])]

    def forget(self) -> None:
        """Drop the shared tensors, as the parameters are replaced; packed copies in use stay as they are."""
        for packed in self.packed_copies():
            packed.finish()
        self._shared, self._packed = {}, {}

    # -- nn.Module -------------------------------------------------------------------------------

    @property
    def __class__(self) -> Any:  # Who looks for layers of a class finds them by isinstance.
        return self.__dict__.get("_class") or type(self.__dict__.get("template", self))

    @__class__.setter
    def __class__(self, cls: Any) -> None:
        stated = self.__class__
        mixed = stated in cls.__bases__ and not issubclass(cls, Operator)
        if mixed:  # A tool puts a class before that of the layer.
            bases = tuple(type(self) if base is stated else base for base in cls.__bases__)
            self.__dict__["_class"] = cls
            cls = type(cls.__name__, bases, {n: v for n, v in vars(cls).items() if n not in _OF_CLASSES})
        vars(object)["__class__"].__set__(self, cls)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shared": {}, "_packed": {}}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (type(self),), self.__getstate__()

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if self.__dict__.get("actuation") is None or not self._varies(name, value):
            return value
        if not (name.startswith("forward_") or in_forward(self)):  # timm's `forward_features` is one, too.
            return value
        return getattr(self.module_of(self._run()), name)  # A forward sees the module of the subnet.

    def _varies(self, name: str, value: Any) -> bool:
        """Tell whether an attribute may be another one in a subnet."""
        if isinstance(value, Tensor) or hasattr(type(self.template), name):
            return True
        return name in self.sizes_of(self.actuation.largest.row)[1]  # type: ignore[union-attr]

    def _get_name(self) -> str:
        return type(self).__name__

    def __setattr__(self, name: str, value: Any) -> None:
        if self.actuation is not None and not (name in self.__dict__ or hasattr(type(self), name)):
            setattr(self.template, name, value)
        else:
            super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Operator:
        """Put the template into training mode, or out of it; what a `train` of its own does counts here."""
        self.template.train(mode)  # It has the same submodules.
        self.training = self.template.training
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module of the subnet that runs returns for `args` and `kwargs`.

        Raises:
            SpecError: the operator is in no supernet.
        """
        module = self.module_of(self._run())
        plain = type(module).__call__ is nn.Module.__call__  # It has no hooks: those of the operator ran.
        return (module.forward if plain else module)(*args, **kwargs)

    def _run(self) -> Run:
        if self.actuation is None:
            raise SpecError(f"{self.path}: an elastic module runs only in a network that insert_ changed")
        return self.actuation.now()

    def module_of(self, run: Run) -> Any:
        """Return the module of the subnet of a `run` for one call.

        Gradients of its parameters reach those of this operator. It has this operator's mode and submodules.
        """
        if self.precision_dim is not None and run.row[self.precision_dim] != FLOAT_BITS and not self.training:
            return self.bind(run.row)
        sizes, attributes = self.sizes_of(run.row)
        buffers = self._buffers_of(sizes)
        if buffers and self.training and not run.is_largest:
            buffers = {n: None if b is None else b.detach().clone() for n, b in buffers.items()}
        module = called_module(self, self.tensors(sizes), buffers, self._modules, attributes)
        alone = self.training or self.actuation is None
        return module if alone else self.actuation.corrected(module, run, self.path)  # type: ignore[union-attr]

    def sizes_of(self, row: SizeRow) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Return the `sizes` and `attributes` of a size row, which are computed once if they are numbers."""
        known = self._sizes.get(key := self._key(row))
        if known is None:
            sizes = self.sizes(row)
            known = sizes, self.attributes(sizes)
            if all(isinstance(value, int | tuple) for value in known[1].values()):
                self._sizes[key] = known
        return known

    def on_another(self, module: nn.Module) -> Operator | None:
        """Return an operator that slices another `module` in the same way, or None if its sizes are others.

        Raises:
            InsertError: the operator does not support the settings of the module.
        """
        if type(module) is type(self.template):
            operator = type(self)(module, self.path, self.dims, *([self.segments] if self.segments else []))
            if all(operator.full(part) == self.full(part) for part in self.dims if part in self.parts):
                operator.check()
                operator.actuation, operator.packs = self.actuation, self.packs
                operator.precision_dim = self.precision_dim
                return operator
        return None

    def extra_repr(self) -> str:
        """Return the template and the elastic parts, for the printed network."""
        return f"{self.template!r}, elastic: {', '.join(self.dims)}"

    def refuse(self, why: str) -> InsertError:
        """Return the error that says why this operator cannot make its template elastic."""
        kind = type(self.template).__name__
        return InsertError(f"{self.path}: {type(self).__name__} cannot make this {kind} elastic: {why}")


def template_of(module: nn.Module) -> Any:
    """Return the ordinary module that an operator replaced, or the module itself."""
    return module.template if isinstance(module, Operator) else module


def exchange_modules_(network: nn.Module, others: Mapping[Any, nn.Module]) -> None:
    """Put other modules into the places of some of a network, in place."""
    for module in list(network.modules()):
        for name, child in module._modules.items():
            if child in others:
                module._modules[name] = others[child]
