"""put_operators_: puts operators into an ordinary network, as an elastic description says."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from subnetact.errors import InsertError
from subnetact.operators import Elastic, ElasticAttribute, Operator, Segments, SubnetNorm
from subnetact.operators.actuation import OF_LAYERS
from subnetact.operators.base import exchange_modules_
from subnetact.operators.layer_traits import is_batch_norm
from subnetact.operators.vocabulary import EXPERTS, EXPERTS_PER_TOKEN
from subnetact.space import SizeRow, SubnetSpace
from subnetact.supernet.adapters import adapted, is_adapter, slices_of
from subnetact.supernet.supernet import InsertReport, Supernet


def put_operators_(network: nn.Module, space: SubnetSpace, elastic: Mapping[str, Elastic]) -> Supernet:
    """Put operators into a network in place, as `subnetact.insert_` says; a refused network is unchanged."""
    modules = {path: adapted(module) for path, module in network.named_modules()}
    ends = space.resolve(space.smallest()), space.resolve(space.largest())
    operators: dict[nn.Module, Operator] = {}
    for path, entry in elastic.items():
        if not isinstance(entry, Elastic):
            raise InsertError(f"{path}: {entry!r} is no description; make one with WeightSlice.on(out=...)")
        if path == "" and entry.operator is not ElasticAttribute:
            raise InsertError(
                f"{entry}: only ElasticAttribute describes the network itself; wrap it in a Sequential"
            )
        if path not in modules:
            close = difflib.get_close_matches(path, modules, n=3) or list(modules)[1:4]
            raise InsertError(f"the network has no module {path!r}; did you mean {', '.join(close)}?")
        module = modules[path]
        own = {*module._parameters, *module._buffers}
        if "weight" not in own and isinstance(getattr(module, "weight", None), Tensor):
            raise InsertError(
                f"{path}: its weight is computed from other parameters (a weight or spectral norm, pruning "
                "or another parametrisation); make it permanent first, with subnetact.insertion.fold_(model)"
            )
        operators[module] = _operator(module, path, entry, space, ends)
    for path, module in modules.items():
        if is_batch_norm(module) and module.running_mean is not None:
            operators.setdefault(module, SubnetNorm(module, path, {}))
    described = {o.path: str(elastic.get(o.path, Elastic(SubnetNorm, {}))) for o in operators.values()}
    for path, layer in network.named_modules():
        base = adapted(layer)
        if is_adapter(layer) and base in operators:
            operators = slices_of(layer, operators[base], path) | operators
    fixed = (n for n, m in modules.items() if m not in operators and list(m.parameters(recurse=False)))
    report = InsertReport(described, tuple(fixed))
    exchange_modules_(network, operators)
    numbers = _numbers_of_layers(network, operators.values())
    if numbers and network not in operators:
        vars(network)[OF_LAYERS] = numbers
    return Supernet(operators.get(network, network), space, report)


def _numbers_of_layers(network: nn.Module, operators: Iterable[Operator]) -> dict[str, tuple[int, ...]]:
    """Return the numbers of experts that a network holds beside its layers, for a balancing loss, with the
    positions of those of the layers in a size row.
    """
    found: dict[str, tuple[int, ...]] = {}
    for names in (EXPERTS_PER_TOKEN, EXPERTS):
        at = {
            (operator.full(part), position)
            for operator in operators
            if isinstance(operator, ElasticAttribute)
            for part, position in operator.dims.items()
            if part.rpartition(".")[2] in names
        }
        for name in names:
            own = tuple(position for full, position in sorted(at) if vars(network).get(name) == full)
            found |= {name: own} if own else {}
    return found


def _operator(
    module: nn.Module, path: str, entry: Elastic, space: SubnetSpace, ends: tuple[SizeRow, SizeRow]
) -> Operator:
    kind, parts, follows = entry.operator, entry.operator.parts, entry.dimensions()
    for part, given in entry.follows.items():
        if parts and part not in parts:
            raise InsertError(f"{path}: {kind.__name__} has no part {part!r}; choose from {', '.join(parts)}")
        if isinstance(given, Segments) and parts and part not in kind.segmented:
            raise InsertError(
                f"{path}: {part!r} of a {kind.__name__} is one segment, got {given}; give one dimension "
                f"(parts that can have Segments: {', '.join(kind.segmented) or 'none'})"
            )
    for dimension in follows.values():
        if dimension not in space.dimensions:
            raise InsertError(
                f"{path}: {space.name} has no dimension {dimension!r}; "
                f"it has {', '.join(space.dimensions[:20])}{' ...' if len(space.dimensions) > 20 else ''}"
            )
    dims = {part: space.dimensions.index(dimension) for part, dimension in follows.items()}
    segments = entry.segments()
    operator = kind(module, path, dims, segments) if segments else kind(module, path, dims)
    operator.check()
    for part, lengths in segments.items():
        if sum(lengths) != operator.full(part):
            raise InsertError(
                f"{path}: the segments of {part!r}, {entry.follows[part]}, are {sum(lengths)} long together, "
                f"the module is {operator.full(part)}"
            )
    smallest, largest = ends
    for part, index in dims.items():
        if smallest[index] > largest[index]:
            raise InsertError(
                f"{path}: {space.dimensions[index]} is {smallest[index]} in the smallest subnet and "
                f"{largest[index]} in the largest; list choices from the smallest network to the largest"
            )
        if largest[index] > operator.length(part):
            raise InsertError(
                f"{path}: the largest subnet has {largest[index]} at {space.dimensions[index]}, "
                f"the module only {operator.length(part)}"
            )
    return operator
