"""sensitivity: what an example shows of a network; a comparison counts only if it could have failed.

For every part of an operator that follows a dimension, other numbers in the slice that a subnet uses must
change an output. Gradients say so for all parts at once. Where they are as good as zero, other numbers are
put in and the subnet runs again, because a threshold has no gradient. Where an example shows nothing of a
part (it is zero, all its tokens are alike or there is one only), other inputs of its form are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from subnetact.comparison import ROUNDED, equal
from subnetact.device import raise_if_explained
from subnetact.space import SizeRow
from subnetact.supernet.batches import map_tensors, tensors_of
from subnetact.supernet.bind import operators_in
from subnetact.supernet.failure import failure
from subnetact.supernet.module_outputs import module_outputs

NOT_SHOWN = (
    "the example does not show what {} computes: other numbers in it change no output; give an example whose "
    "values differ, of several tokens and with something in its outputs"
)
WEAK = 1e-5
"""Outputs of a layer whose influence is below this share of the strongest ones' may have none."""
LOW = 1e-4
"""If all numbers of a part together move the outputs by less than this share of them, none may be seen."""
MOST_WEAK = 0.6
"""If more of the outputs of a layer are weak, these may be the queries and keys of a fused layer."""
LARGE = 30.0
"""How many times as large numbers are tried where others change nothing, which may decide a choice."""
FEW_TOKENS, FEW_PIXELS = 8, 36
"""What is tried on many subnets has about so many tokens, or pixels per side, if the network takes these."""

FEW_PLACES = 4
"""So few places are tried one by one, which takes fewer runs than halves do where most change outputs."""

Place: TypeAlias = tuple[str, str]
"""The name of an operator, and of a part of it or a segment of a part."""
Pieces: TypeAlias = list[tuple[nn.Parameter, int, int, int, int]]
"""Parameters of a view: how many axes stack others in front, an axis, and a start and a size on it."""
Weak: TypeAlias = list[tuple[Tensor, Tensor]]
"""Pieces of parameters, each with a mask of where they are weak."""
Outputs: TypeAlias = dict[Any, Tensor]
Run: TypeAlias = Callable[[], Outputs]


def showing(
    network: nn.Module,
    view: nn.Module,
    row: SizeRow,
    inputs: Iterable[Any],
    full: nn.Module | None = None,
    asked: Collection[int] | None = None,
) -> tuple[list[Any], dict[int, str]]:
    """Return the first of some inputs that together show all of a subnet, and what none of them shows.

    This is the name of a part by its place in the sizes; `asked` are the places that count, if not all do.
    With the view of the `full` network, outputs of modules count, too, if they have the same shape there.
    """
    dims = {operator.path: operator.dims for operator in operators_in(network)}
    places, useful = _places(network, view, row), list[Any]()
    hidden = [(path, part) for path, part in places if asked is None or dims[path][part] in asked]
    for x in inputs if hidden else ():
        shapes = None if full is None else {key: t.shape for key, t in _outputs(full, x, {}).items()}
        still = _hidden(partial(_outputs, view, x, shapes), places, hidden)
        useful += [x] if len(still) < len(hidden) else []
        hidden = still
        if not hidden:
            break
    return useful, {dims[path][part]: f"{path}.{part}" for path, part in hidden}


def _outputs(view: nn.Module, x: Any, shapes: dict[Any, torch.Size] | None) -> Outputs:
    """Run a view; return the tensors of its output or, given shapes, those of its modules that have them."""
    outputs = module_outputs(view, x, lambda _, tensor: tensor, inside=shapes is not None)
    tensors = {(output.path, i): t for output in outputs for i, t in enumerate(output.tensors)}
    return {key: t for key, t in tensors.items() if not shapes or shapes.get(key) == t.shape}


def _places(network: nn.Module, view: nn.Module, row: SizeRow) -> dict[Place, Pieces]:
    """Return the parts that follow a dimension, each with its pieces of the parameters of a view."""
    modules, places = dict(view.named_modules()), dict[Place, Pieces]()
    for operator in operators_in(network):
        parameters = getattr(modules.get(operator.path), "_parameters", {})
        given = [(n, p) for n, p in parameters.items() if p is not None and n in operator._parameters]
        for part, kept in zip(operator.parts, operator.kept_parts(operator.sizes(row)), strict=False):
            start = 0
            for name, size in zip(operator.names(part), kept.sizes, strict=False):
                pieces = [
                    (p, lead, lead + i, start, size)
                    for n, p in given
                    for lead in [p.dim() - operator.get_parameter(n).dim()]
                    for i, axis in enumerate(operator.axes(n))
                    if axis == part and p.is_floating_point()
                ]
                if name in operator.dims and pieces and size:
                    places[operator.path, name] = pieces
                start += size
    return places


def _hidden(run: Run, places: dict[Place, Pieces], asked: Iterable[Place]) -> list[Place]:
    """Return the places among those `asked` in which other numbers change no output of a run."""
    parameters = list({id(p): p for pieces in places.values() for p, *_ in pieces}.values())
    outputs, gradients = _gradients(run, parameters)
    sizes = {p: torch.linalg.vector_norm(p) / p.numel() ** 0.5 for p in parameters}
    lines = {
        place: [_lines(gradients[p], place, *at) * sizes[p] for p, *at in pieces]
        for place, pieces in places.items()
    }
    least = WEAK * max(float(strength.max()) for strengths in lines.values() for strength in strengths)
    weak: dict[Place, Weak] = {}
    for place in asked:
        low = sum(float(strength.square().sum()) for strength in lines[place]) ** 0.5 < LOW
        masks = [strength <= (torch.inf if low else least) for strength in lines[place]]
        if all(int(mask.sum()) >= MOST_WEAK * mask.numel() for mask in masks):
            pieces = zip(places[place], masks, strict=True)
            weak[place] = [(p.detach().narrow(*at), mask) for (p, _, *at), mask in pieces]
    return _still(run, weak, outputs) if weak and _moves(run, weak, outputs) else list(weak)


def _still(run: Run, weak: dict[Place, Weak], outputs: Outputs) -> list[Place]:
    """Return the places, of some that together change an output, in which other numbers alone change none."""
    items, still = list(weak.items()), list[Place]()
    if len(items) < 2:
        return []
    count = -(-len(items) // 2) if len(items) > FEW_PLACES else 1
    for start in range(0, len(items), count):
        part = dict(items[start : start + count])
        few = 1 < len(part) <= FEW_PLACES
        still += _still(run, part, outputs) if few or _moves(run, part, outputs) else part
    return still


def _lines(gradient: Tensor, place: Place, lead: int, axis: int, start: int, size: int) -> Tensor:
    """Return how strong a piece is, for each output of a layer, and else as a whole."""
    piece = gradient.narrow(axis, start, size)
    if not place[1].startswith("out"):
        return torch.nan_to_num(torch.linalg.vector_norm(piece)).view([1] * piece.dim())
    inner = tuple(i for i in range(lead, piece.dim()) if i != axis)
    strength = torch.linalg.vector_norm(piece, dim=inner, keepdim=True) if inner else piece.abs()
    return torch.nan_to_num(strength)


def _gradients(run: Run, parameters: list[nn.Parameter]) -> tuple[Outputs, dict[nn.Parameter, Tensor]]:
    """Return the outputs of a run, and the gradients of a random sum of them, zeros where there are none."""
    gradients: Any = list(map(torch.zeros_like, parameters))
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            outputs, total = run(), torch.zeros(())
            draw = torch.Generator().manual_seed(0)
            for y in (t for t in outputs.values() if t.requires_grad):
                y = torch.view_as_real(y) if y.is_complex() else y
                y = torch.where(y.isfinite(), y, 0.0).float()
                weights = torch.rand(y.shape, generator=draw).to(y.device) + 0.5
                total = total.to(y.device) + (y * weights).sum() / (y.detach().norm() + 1e-9)
        if total.requires_grad:
            gradients = torch.autograd.grad(total, parameters, materialize_grads=True)
    except Exception as error:  # It runs without gradients only.
        raise_if_explained(error)
        with torch.no_grad():
            outputs = run()
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
    return {key: t.detach() for key, t in outputs.items()}, dict(zip(parameters, gradients, strict=True))


@torch.no_grad()
def _moves(run: Run, weak: dict[Place, Weak], outputs: Outputs) -> bool:
    """Tell whether other numbers, at last very large ones, in the place of weak ones change an output."""
    draw, pieces = torch.Generator().manual_seed(1), [piece for place in weak.values() for piece in place]
    former = [piece.clone() for piece, _ in pieces]
    try:
        for size in (1.0, LARGE):
            for (piece, mask), numbers in zip(pieces, former, strict=True):
                scale = size * (float(numbers.square().mean().sqrt()) or 1.0)
                other = scale * torch.randn(piece.shape, generator=draw).to(piece)
                piece.copy_(torch.where(mask, other, numbers))
            if not equal(run(), outputs, ROUNDED):
                return True
        return False
    except Exception as error:  # It fails, so that it is not as before.
        raise_if_explained(error)
        return True
    finally:
        for (piece, _), numbers in zip(pieces, former, strict=True):
            piece.copy_(numbers)


# -- inputs ------------------------------------------------------------------------------------------


def other_inputs(network: nn.Module, x: Any) -> Iterator[Any]:
    """Yield inputs like an example on which a network runs: other numbers and indices, more tokens."""
    tensors = [part for part in tensors_of(x) if isinstance(part, Tensor)]
    indices = [t for t in tensors if t.dtype in (torch.int64, torch.int32) and t.numel()]
    rows = {m.num_embeddings for m in network.modules() if isinstance(m, nn.Embedding)}
    rows = rows or {2 + max((int(t.max()) for t in indices), default=0)}
    if any(t.is_cuda for t in tensors):  # An index that is too large would end the process's use of the GPU.
        rows = {min(rows)}
    length = next((t.shape[1] for t in tensors if t.dim() > 1), 0)
    draw = torch.Generator().manual_seed(0)

    def other(t: Tensor, times: int, changed: list[Tensor], most: int) -> Tensor:
        longer = t.repeat_interleave(times, 1) if t.dim() > 1 and t.shape[1] == length else t
        if t.is_floating_point() and bool(t.isfinite().all()):
            scale = float(t.float().square().mean().sqrt()) or 1.0
            return scale * torch.randn(longer.shape, generator=draw).to(t)
        if any(t is index for index in changed):
            return torch.randint(most, longer.shape, generator=draw).to(t)
        return longer

    for times, changed in product((1, 4) if length == 1 else (1,), (indices[:1], indices)):
        vary = partial(other, times=times, changed=changed)
        varied = (map_tensors(partial(vary, most=n), x) for n in sorted(rows)[::-1])
        yield from (variant for variant in varied if failure(network, variant) is None)


def visible(network: nn.Module, x: Any) -> Any:
    """Return a batch, or one of other numbers if some of its tensors are zero, in which faults would hide."""
    zeros = any(isinstance(t, Tensor) and t.is_floating_point() and not t.any() for t in tensors_of(x))
    return next(other_inputs(network, x), x) if zeros else x


def smaller(x: Any) -> list[Any]:
    """Return fewer inputs, tokens and pixels of a batch, at most two; and one alone, or two in its place."""
    parts = [part for part in tensors_of(x) if isinstance(part, Tensor)]
    batch = len(sizes := {t.shape[0] if t.dim() else 0 for t in parts}) == 1 and 0 not in sizes
    length = next((t.shape[1] for t in parts if t.dim() in (2, 3)), 0)

    def cut(t: Tensor) -> Tensor:
        t = t[:2] if batch else t
        if t.dim() == 4 and min(t.shape[2:]) >= 2 * FEW_PIXELS:
            step = min(t.shape[2:]) // FEW_PIXELS
            return t[..., ::step, ::step]
        return t[:, :FEW_TOKENS] if t.dim() in (2, 3) and t.shape[1] == length else t

    few = map_tensors(cut, x)
    return [few, map_tensors(lambda t: torch.cat([t, t]) if len(t) == 1 else t[:1], few)] if batch else [few]
