"""Cut-outs: one subnet as a model of its library's own class, which needs nothing of this package.

transformers describes a subnet in a configuration. The classes of timm and torchvision have one argument for
all layers of a kind, which describes hardly any subnet (`cut_outs` in `benchmarks/results/trials.json`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from subnetact.comparison import equal
from subnetact.device import raise_if_explained
from subnetact.elastic.factories import factory_of, ordinary
from subnetact.errors import InsertError
from subnetact.insertion.hugging_face import as_pretrained, renamed, renumbered
from subnetact.operators.view_module import module_class
from subnetact.spec import FLOAT32, SubnetSpec
from subnetact.supernet.module_outputs import outputs_of
from subnetact.supernet.supernet import Supernet

LIBRARY = "transformers"
OTHERWISE = (
    "choose the same size for all layers, or save the bundle, which from_pretrained(folder, subnet=...) loads"
)


def cut_out(
    supernet: Supernet, spec: SubnetSpec, example: Any, given: Mapping[str, Any] | None
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a subnet as a model of its library's own class, and the factory of that model.

    Args:
        supernet: a supernet of a model of transformers.
        spec: a subnet at float32.
        example: a batch that the model takes, on which both must compute the same.
        given: the factory of the whole model. If None, it is found if it can be.

    Returns:
        The model, in evaluation mode with its own weights, and its `library`, `name` and `arguments`.

    Raises:
        InsertError: no configuration of the class describes the subnet; the message names what differs.
    """
    factory = factory_of(ordinary(supernet.network), given if given and given["library"] == LIBRARY else None)
    if factory is None or factory["library"] != LIBRARY or spec.precision != FLOAT32:
        needed = "subnet at float32" if factory and factory["library"] == LIBRARY else "model of transformers"
        raise InsertError(
            f"{spec}: only a {needed} can be cut out as a model of its library; save the state_dict of "
            "supernet.extract(spec), or the bundle, which holds all subnets"
        )
    found = _plain(as_pretrained(supernet.extract(spec), example))
    view = supernet.subnet(spec)
    if not equal(outputs_of(found, example), outputs_of(view, example)):
        raise InsertError(
            f"{factory['name']} in the shapes of this subnet computes something else: its layers depend on "
            f"their position, or on a number that no shape shows; {OTHERWISE}"
        )
    return found, {**factory, "layered": getattr(found, "builds_each_layer", False)}


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
    kind: Any = type(model).__mro__[1]
    config = copy.deepcopy(model.config)
    config.__class__ = kind.config_class
    with suppress(RuntimeError, ValueError, TypeError, AttributeError):  # Most have layers of one size.
        found: Any = kind(config).to(next(model.parameters())).eval()
        found.load_state_dict(model.state_dict())
        return found  # type: ignore[no-any-return]
    return model  # type: ignore[no-any-return]


def cut_out_card(model: Mapping[str, Any], licence: str | None) -> str:
    """Return the model card of a cut-out in Markdown: how the model's own library opens it."""
    facts = [*([f"license: {json.dumps(licence)}"] if licence else ()), f"library_name: {model['library']}"]
    lines = ["---", *facts, "---", "", f"# {model['name']}, cut out of an elastic model", ""]
    return "\n".join([*lines, "```python", *opening(model), "```", ""])


def opening(model: Mapping[str, Any]) -> list[str]:
    """Return the lines with which the model's own library opens a folder."""
    name, library = model["name"], model["library"]
    arguments = "".join(f", {a}={v!r}" for a, v in model.get("arguments", {}).items())
    if library == "transformers" and model.get("layered"):
        imports = ["from transformers import " + name, "from subnetact.insertion import heterogeneous"]
        return [*imports, f'model = heterogeneous({name}).from_pretrained("folder")']
    if library == "transformers":
        return [f"from transformers import {name}", f'model = {name}.from_pretrained("folder")']
    if library == "timm":
        made = f'timm.create_model("{name}"{arguments}, checkpoint_path="folder/model.safetensors")'
        return ["import timm", f"model = {made}"]
    if library == "torchvision":
        made = f'torchvision.models.get_model("{name}"{arguments})'
        read = 'model.load_state_dict(load_file("folder/model.safetensors"))'
        return ["import torchvision", "from safetensors.torch import load_file", f"model = {made}", read]
    return []
