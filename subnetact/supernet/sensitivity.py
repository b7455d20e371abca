"""sensitivity: what an example shows of a network; a comparison counts only if it could have failed.

For every part of an operator that follows a dimension, other numbers in the slice that a subnet uses must
change an output. Gradients say so for all parts at once. Where they are as good as zero, other numbers are
put in and the subnet runs again, because a threshold has no gradient. Where an example shows nothing of a
part (it is zero, all its tokens are alike or there is one only), other inputs of its form are tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from subnetact.comparison import ROUNDED, equal, tensors_in
from subnetact.device import raise_if_out_of_memory
from subnetact.errors import InsertError
from subnetact.space import SizeRow
from subnetact.supernet.batches import call_with, map_tensors, tensors_of
from subnetact.supernet.bind import operators_in
from subnetact.supernet.failure import failure

__all__ = ["NOT_SHOWN", "Place", "other_inputs", "showing", "smaller"]

NOT_SHOWN = (
    "the example does not show what {} computes: other numbers in it change no output; give an example whose "
    "values differ, of several tokens and with something in its outputs"
)
WEAK = 1e-5
"""A row of a weight whose influence is below this share of the strongest one's may have none."""
LARGE = 30.0
"""How many times as large numbers are tried where others change nothing, which may decide a choice."""
FEW_TOKENS, FEW_PIXELS = 8, 56
"""What is tried on many subnets has about so many tokens, or pixels per side, if the network takes these."""

Place: TypeAlias = tuple[str, str]
"""The name of an operator, and of a part of it or a segment of a part."""
Shapes: TypeAlias = dict[tuple[str, int, int], torch.Size]
"""Name of a module, number of its call and of a tensor in what it returned -> the shape of the tensor."""


class _Slice(NamedTuple):
    """Some entries of an axis of a parameter of a view; of `rows`, each one counts, else all together."""

    parameter: nn.Parameter
    axis: int
    start: int
    size: int
    stacked: bool
    rows: bool

    def lines(self, tensor: Tensor) -> Tensor:
        """Return the entries of a tensor like the parameter, (entries, numbers); one line if not `rows`."""
        taken = tensor.narrow(self.axis, self.start, self.size)
        if not self.rows:
            return taken.reshape(1, -1)
        return (taken.flatten(0, 1) if self.stacked else taken.movedim(self.axis, 0)).unsqueeze(-1).flatten(1)

    def mask(self, chosen: Tensor) -> Tensor:
        """Return which numbers of the parameter the `chosen` ones of `lines` are."""
        mask = torch.zeros_like(self.parameter, dtype=torch.bool)
        taken = mask.narrow(self.axis, self.start, self.size)
        lead = taken.shape[: self.axis] if self.stacked else [1] * self.axis
        taken |= chosen.view(*lead, -1, *[1] * (taken.dim() - self.axis - 1)) if self.rows else True
        return mask


def showing(
    network: nn.Module, view: nn.Module, row: SizeRow, inputs: Iterable[Any], full: nn.Module | None = None
) -> tuple[list[Any], list[Place]]:
    """Return the first of some inputs that together show all of a subnet, and what none of them shows.

    With the view of the `full` network, outputs of modules count, too, if they have the same shape there.
    """
    places = _places(network, view, row)
    useful: list[Any] = []
    for x in inputs if places else ():
        shapes = None if full is None else {place: t.shape for place, t in _outputs(full, x, {}).items()}
        hidden = _hidden(view, places, x, shapes)
        if len(hidden) < len(places):
            useful.append(x)
        places = {place: places[place] for place in hidden}
        if not places:
            break
    return useful, list(places)


def _outputs(view: nn.Module, x: Any, shapes: Shapes | None) -> dict[Any, Tensor]:
    """Run a view and return the tensors of its output or, if there are shapes, those of all its modules.

    The keys are the name of the module, the number of the call, and that of the tensor; only tensors with the
    given shapes are returned, or all of them.
    """
    tensors: dict[Any, Tensor] = {}
    calls = Counter[str]()

    def note(path: str, module: nn.Module, _: Any, output: Any) -> None:
        calls[path] += 1
        with suppress(InsertError):
            for i, t in enumerate(
                tensors_in(output[0] if isinstance(module, nn.MultiheadAttention) else output)
            ):
                if not shapes or shapes.get((path, calls[path], i)) == t.shape:
                    tensors[path, calls[path], i] = t

    with ExitStack() as hooks:
        for path, module in view.named_modules() if shapes is not None else ():
            hooks.enter_context(module.register_forward_hook(partial(note, path)))
        output = call_with(view, map_tensors(Tensor.clone, x))
    return dict(enumerate(tensors_in(output))) if shapes is None else tensors


def _places(network: nn.Module, view: nn.Module, row: SizeRow) -> dict[Place, list[_Slice]]:
    """Return the parts that follow a dimension, each with its slices of the parameters of a view."""
    modules, places = dict(view.named_modules()), dict[Place, list[_Slice]]()
    for operator in operators_in(network):
        parameters = getattr(modules.get(operator.path), "_parameters", {})
        for part, kept in zip(operator.parts, operator.kept_parts(operator.sizes(row)), strict=False):
            start = 0
            for name, size in zip(operator.names(part), kept.sizes, strict=False):
                slices = [
                    _Slice(parameter, axis, start, size, bool(extra), part == "out")
                    for n, parameter in parameters.items()
                    if parameter is not None and parameter.is_floating_point() and n in operator._parameters
                    for extra in [parameter.dim() - operator.get_parameter(n).dim()]
                    for axis in [i + extra for i, p in enumerate(operator.axes(n)) if p == part]
                ]
                if name in operator.dims and slices and size:
                    places[operator.path, name] = slices
                start += size
    return places


def _hidden(
    view: nn.Module, places: Mapping[Place, list[_Slice]], x: Any, shapes: Shapes | None
) -> list[Place]:
    """Return the places in which other numbers change no output for an input."""
    parameters = list({id(s.parameter): s.parameter for slices in places.values() for s in slices}.values())
    run = partial(_outputs, view, x, shapes)
    outputs, gradients = _gradients(run, parameters)
    strengths = {id(p): g * p.square().mean().sqrt() for p, g in zip(parameters, gradients, strict=True)}
    lines = {
        place: [(s, s.lines(strengths[id(s.parameter)]).norm(dim=1)) for s in slices]
        for place, slices in places.items()
    }
    least = WEAK * max((float(norms.max()) for each in lines.values() for _, norms in each), default=0.0)
    hidden = []
    for place, each in lines.items():
        weak = [(s, norms <= least) for s, norms in each]
        faint = all(int(chosen.sum()) * 2 > len(chosen) for _, chosen in weak)
        if faint and not _moves(run, weak, outputs):
            hidden.append(place)
    return hidden


def _gradients(
    run: Callable[[], dict[Any, Tensor]], parameters: Sequence[nn.Parameter]
) -> tuple[dict[Any, Tensor], list[Tensor]]:
    """Return the outputs of a run and the gradients of a random sum of them, zeros where there are none."""
    gradients: Sequence[Tensor | None] = [None] * len(parameters)
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            outputs = run()
            draw = torch.Generator().manual_seed(0)
            total: Any = 0.0
            for y in (t for t in outputs.values() if t.requires_grad):
                y = torch.view_as_real(y) if y.is_complex() else y
                seen = torch.where(y.isfinite(), y, 0.0).float()
                weights = torch.rand(y.shape, generator=draw).to(seen.device) + 0.5
                total = total + (seen * weights).sum() / (seen.detach().norm() + 1e-9)
        if isinstance(total, Tensor):
            gradients = torch.autograd.grad(total, list(parameters), allow_unused=True)
    except Exception as error:  # It runs without gradients only.
        raise_if_out_of_memory(error)
        with torch.no_grad():
            outputs = run()
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
    return {key: t.detach() for key, t in outputs.items()}, [
        torch.zeros_like(p) if g is None else g.nan_to_num()
        for p, g in zip(parameters, gradients, strict=True)
    ]


def _moves(
    run: Callable[[], dict[Any, Tensor]], weak: list[tuple[_Slice, Tensor]], outputs: dict[Any, Tensor]
) -> bool:
    """Tell whether other numbers in weak lines, some of them very large, change an output."""
    draw = torch.Generator().manual_seed(1)
    former = [s.parameter.detach().clone() for s, _ in weak]
    try:
        with torch.no_grad():
            for size in (1.0, LARGE):
                for (s, chosen), numbers in zip(weak, former, strict=True):
                    scale = size * (float(numbers.square().mean().sqrt()) or 1.0)
                    other = scale * torch.randn(numbers.shape, generator=draw).to(numbers)
                    s.parameter.copy_(torch.where(s.mask(chosen), other, numbers))
                if not equal(run(), outputs, ROUNDED):
                    return True
        return False
    except Exception as error:  # It fails, so that it is not as before.
        raise_if_out_of_memory(error)
        return True
    finally:
        with torch.no_grad():
            for (s, _), numbers in zip(weak, former, strict=True):
                s.parameter.copy_(numbers)


# -- inputs ------------------------------------------------------------------------------------------


def other_inputs(network: nn.Module, x: Any) -> Iterator[Any]:
    """Yield inputs like an example on which a network runs: other numbers and indices, more tokens."""
    tensors = [part for part in tensors_of(x) if isinstance(part, Tensor)]
    indices = [t for t in tensors if t.dtype in (torch.int64, torch.int32)]
    rows = {m.num_embeddings for m in network.modules() if isinstance(m, nn.Embedding)}
    rows = rows or {2 + max((int(t.max()) for t in indices if t.numel()), default=0)}
    asserts = any(t.is_cuda for t in tensors)  # An index that is too large would end the process's use of it.
    length = next((t.shape[1] for t in tensors if t.dim() > 1), 0)
    draw = torch.Generator().manual_seed(0)
    for times in (1, 4) if length == 1 else (1,):
        for number in {1, len(indices)} if indices else (0,):
            for most in [min(rows)] if asserts else sorted(rows, reverse=True):
                changed = {id(t) for t in indices[:number]}

                def other(
                    t: Tensor, times: int = times, most: int = most, changed: set[int] = changed
                ) -> Tensor:
                    longer = t.repeat_interleave(times, 1) if t.dim() > 1 and t.shape[1] == length else t
                    if t.is_floating_point() and bool(t.isfinite().all()):
                        scale = float(t.float().square().mean().sqrt()) or 1.0
                        return scale * torch.randn(longer.shape, generator=draw).to(t)
                    if id(t) in changed:
                        return torch.randint(most, longer.shape, generator=draw).to(t)
                    return longer

                varied = map_tensors(other, x)
                if failure(network, varied) is None:
                    yield varied
                    break


def smaller(network: nn.Module, x: Any) -> Any:
    """Return fewer inputs, tokens and pixels of a batch if a network runs on them as on all, or the batch."""
    parts = [part for part in tensors_of(x) if isinstance(part, Tensor)]
    batch = len({t.shape[0] if t.dim() else 0 for t in parts}) == 1
    length = next((t.shape[1] for t in parts if t.dim() in (2, 3)), 0)

    def cut(t: Tensor) -> Tensor:
        if batch:
            t = t[:2]
        if t.dim() == 4 and min(t.shape[2:]) >= 2 * FEW_PIXELS:
            step = min(t.shape[2:]) // FEW_PIXELS
            return t[..., ::step, ::step]
        return t[:, :FEW_TOKENS] if t.dim() in (2, 3) and t.shape[1] == length else t

    few = map_tensors(cut, x)
    less = any(t.shape != s.shape for t, s in zip(parts, tensors_of(few), strict=False))
    return few if less and failure(network, few) is None else x
