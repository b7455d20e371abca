"""Cut-outs: one subnet as a model of its library's own class, which needs nothing of this package.

transformers describes a subnet in a configuration. The classes of timm and torchvision have arguments. Those
of a subnet are found by trying: a number is scaled as tensors were, or a length is made that of a stack
without the skipped layers, and the change that brings most tensors to their shapes stays.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from subnetact.comparison import equal
from subnetact.device import raise_if_explained
from subnetact.elastic.factories import factory_of, make_network, ordinary
from subnetact.errors import InsertError
from subnetact.insertion.hugging_face import as_pretrained, renamed, renumbered
from subnetact.insertion.thread_patch import patched_here
from subnetact.operators.view_module import module_class
from subnetact.spec import FLOAT32, SubnetSpec
from subnetact.supernet.module_outputs import outputs_of
from subnetact.supernet.supernet import Supernet

LIBRARIES = ("transformers", "timm", "torchvision")
MOST_CHANGES, MOST_SHARES = 64, 6
"""The most changes of arguments, one after another, and the most shares of sizes that are tried."""
OTHERWISE = (
    "choose the same size for all layers, or save the bundle, which from_pretrained(folder, subnet=...) loads"
)


def cut_out(
    supernet: Supernet, spec: SubnetSpec, example: Any, given: Mapping[str, Any] | None
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a subnet as a model of its library's own class, and the factory of that model.

    Args:
        supernet: a supernet of a model of transformers, timm or torchvision.
        spec: a subnet at float32.
        example: a batch that the model takes, on which both must compute the same.
        given: the factory of the whole model. If None, it is found if it can be.

    Returns:
        The model, in evaluation mode with its own weights, and its `library`, `name` and `arguments`; for
        torchvision also `call`, the expression that makes it.

    Raises:
        InsertError: no arguments of the class describe the subnet; the message names what differs.
    """
    whole = ordinary(supernet.network)
    factory = factory_of(whole, given if given and given["library"] in LIBRARIES else None)
    if factory is None or spec.precision != FLOAT32:
        needed = "subnet at float32" if factory else "network that transformers, timm or torchvision makes"
        raise InsertError(
            f"{spec}: only a {needed} can be cut out as a model of its library; save the state_dict of "
            "supernet.extract(spec), or the bundle, which holds all subnets"
        )
    view, extracted = supernet.subnet(spec), supernet.extract(spec)
    if factory["library"] == "transformers":
        found = _plain(as_pretrained(extracted, example))
    else:
        found, factory = _made(whole, extracted, factory)
    if not equal(outputs_of(found, example), outputs_of(view, example)):
        raise InsertError(
            f"{factory['name']} in the shapes of this subnet computes something else: its layers depend on "
            f"their position, or on a number that no shape shows; {OTHERWISE}"
        )
    return found, factory


def save_alone(subnet: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
    """Write a view or an extracted network as `save_pretrained` of the class of its library does.

    Raises:
        InsertError: no configuration describes the subnet, or it cannot be compared without an example.
    """
    training = [module for module in subnet.modules() if module.training]
    try:
        found: Any = _plain(as_pretrained(subnet.eval(), _inputs_of(subnet)))
        if kwargs.get("state_dict") is not None:
            kwargs["state_dict"] = renamed(kwargs["state_dict"], renumbered(subnet))
    except Exception as error:  # Whatever a model says of inputs that are not for it.
        raise_if_explained(error, InsertError)
        raise InsertError(
            f"{module_class(subnet).__name__} cannot save this subnet, as it does not run on inputs "
            f"that are made up ({error!s:.200}); give some: supernet.save_pretrained(folder, only=spec, "
            "example=x), or insertion.as_pretrained(supernet.extract(spec), x).save_pretrained(folder)"
        ) from error
    finally:
        for module in training:
            module.training = True
    return found.save_pretrained(folder, *args, **kwargs)


def _inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """Return inputs on which a model of transformers runs."""
    device, config = next(model.parameters()).device, getattr(model, "config", None)
    if getattr(model, "main_input_name", "") == "pixel_values":
        size = getattr(config, "image_size", 224)
        sides = size if isinstance(size, list | tuple) else (size, size)
        generator = torch.Generator().manual_seed(0)
        image = torch.rand(1, getattr(config, "num_channels", 3), *sides, generator=generator)
        return {"pixel_values": image.to(next(model.parameters()))}
    return {name: tensor.to(device) for name, tensor in getattr(model, "dummy_inputs", {}).items()}


def _plain(model: Any) -> nn.Module:
    """Return a model as its plain class in transformers builds it from its configuration, if that can."""
    if not getattr(model, "builds_each_layer", False):
        return model  # type: ignore[no-any-return]
    import transformers

    kind: Any = getattr(transformers, type(model).__name__)
    try:
        found: Any = kind(copy.deepcopy(model.config)).to(next(model.parameters())).eval()
        found.load_state_dict(model.state_dict())
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise InsertError(
            f"{kind.__name__} of transformers builds no layers of different sizes ({why:.240}); {OTHERWISE}"
        ) from error
    return found  # type: ignore[no-any-return]


def _made(full: nn.Module, extracted: nn.Module, factory: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return an extracted network as its class makes it with other arguments, and the factory of that."""
    moved, weights = renumbered(extracted), extracted.state_dict()
    scaled = Counter(
        new / old
        for name, tensor in full.state_dict().items()
        for new, old in zip(getattr(weights.get(name), "shape", ()), tensor.shape, strict=False)
        if new != old
    )
    shares = [share for share, _ in scaled.most_common(MOST_SHARES)]
    lengths = {(len(list(full.get_submodule(p).children())), len(kept)) for p, kept in moved.items()}
    weights = renamed(weights, moved)
    wanted = {name: tensor.shape for name, tensor in weights.items()}
    kind, torchvision = type(full), factory["library"] == "torchvision"
    explicit = _arguments(kind, factory)
    known = {n: p.default for n, p in inspect.signature(kind).parameters.items()} | explicit

    def factory_with(changed: Mapping[str, Any]) -> dict[str, Any]:
        found = {**factory, "arguments": {**factory["arguments"], **changed}}
        if torchvision:
            stated = ", ".join(f"{n}={_expression(v)}" for n, v in {**explicit, **changed}.items())
            found["call"] = f"{_expression(kind)}({stated})"
        return found

    def network(changed: Mapping[str, Any], size: int | None) -> nn.Module:
        if not torchvision:
            return make_network(factory_with(changed), None, size)
        with torch.random.fork_rng(devices=[]), torch.device("meta" if size is None else "cpu"):
            return kind(**{**explicit, **changed})  # its builders take no numbers of layers

    def shapes(changed: Mapping[str, Any]) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in network(changed, None).state_dict().items()}

    def differing(changed: Mapping[str, Any]) -> float:
        try:
            own = shapes(changed)
        except Exception:  # Whatever a library says of arguments that it cannot take.
            return math.inf
        return sum(own.get(name) != wanted.get(name) for name in {**wanted, **own})

    changed: dict[str, Any] = {}
    left = differing(changed)
    for _ in range(MOST_CHANGES if left else 0):
        numbers = {**known, **changed}.items()
        tries = [{**changed, n: v} for n, number in numbers for v in _candidates(number, shares, lengths)]
        now, best = min(((differing(t), t) for t in tries), key=itemgetter(0), default=(left, changed))
        if now >= left:
            break
        changed, left = best, now
    if left:
        own = shapes(changed)
        name = next(n for n in {**wanted, **own} if wanted.get(n) != own.get(n))
        have, want = (tuple(s[name]) if name in s else "absent" for s in (own, wanted))
        stated = ", ".join(f"{a}={v}" for a, v in changed.items()) or "those of the full network"
        raise InsertError(
            f"no arguments of {factory['name']} describe this subnet: with {stated}, {name} is {have}, and "
            f"{want} in the subnet; {OTHERWISE}"
        )
    found = network(changed, sum(tensor.nbytes for tensor in weights.values()))
    found.to(next(extracted.parameters()).dtype).load_state_dict(weights)
    return found.eval(), factory_with(changed)


def _arguments(kind: Any, factory: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a factory gives to the class of its network, by name."""
    found: dict[str, Any] = {}
    make = kind.__init__

    def watching(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(make).bind(self, *args, **kwargs)
        if type(self) is kind and not found:
            found.update(list(given.arguments.items())[1:])
        make(self, *args, **kwargs)

    with patched_here(kind, __init__=watching):
        make_network(factory, None, None)
    return {**found.pop("kwargs", {}), **found}


def _candidates(number: Any, shares: Iterable[float], lengths: Iterable[tuple[int, int]]) -> Iterator[Any]:
    """Yield what an argument may be in a subnet that has these shares of sizes, and of lengths of stacks."""
    if isinstance(number, list | tuple):
        for i, inner in enumerate(number):
            for value in _candidates(inner, shares, lengths):
                yield [*number[:i], value, *number[i + 1 :]]
    elif isinstance(number, float) and number > 0:
        yield from (number * share for share in shares)
        yield from (number * share * (1 + 1e-9) for share in shares)  # It may be rounded down.
    elif type(number) is int and number > 0:
        yield from {kept for full, kept in lengths if full == number}
        yield from {round(number * share) for share in shares} - {0, number}


def cut_out_card(model: Mapping[str, Any], licence: str | None) -> str:
    """Return the model card of a cut-out in Markdown: how the model's own library opens it."""
    facts = [*([f"license: {json.dumps(licence)}"] if licence else ()), f"library_name: {model['library']}"]
    lines = ["---", *facts, "---", "", f"# {model['name']}, cut out of an elastic model", ""]
    return "\n".join([*lines, "```python", *opening(model), "```", ""])


def opening(model: Mapping[str, Any]) -> list[str]:
    """Return the lines with which the model's own library opens a folder."""
    name, library = model["name"], model["library"]
    arguments = "".join(f", {a}={v!r}" for a, v in model.get("arguments", {}).items())
    if library == "transformers":
        return [f"from transformers import {name}", f'model = {name}.from_pretrained("folder")']
    if library == "timm":
        made = f'timm.create_model("{name}"{arguments}, checkpoint_path="folder/model.safetensors")'
        return ["import timm", f"model = {made}"]
    if library == "torchvision":
        made = model.get("call", f'torchvision.models.get_model("{name}"{arguments})')
        read = 'model.load_state_dict(load_file("folder/model.safetensors"))'
        used = [f"import {package}" for package in ("functools", "torch") if f"{package}." in made]
        imports = [*used, "import torchvision", "from safetensors.torch import load_file"]
        return [*imports, f"model = {made}", read]
    return []


def _expression(value: Any) -> str:
    """Return the Python expression of an argument of a class of torchvision."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, partial):
        stated = (_expression(value.func), *(f"{n}={_expression(v)}" for n, v in value.keywords.items()))
        return f"functools.partial({', '.join(stated)})"
    return repr(value)
