"""Cut-outs: one subnet as a model of its library's own class, which needs nothing of this package.

transformers describes a subnet in a configuration. The classes of timm and torchvision have one argument for
all layers of a kind, which describes hardly any subnet (`cut_outs` in `benchmarks/results/trials.json`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from subnetact.comparison import equal
from subnetact.device import raise_if_explained
from subnetact.elastic.factories import without_progress_bars
from subnetact.errors import InsertError, SpecError
from subnetact.files.atomic import replacing_folder
from subnetact.files.documents import StrPath
from subnetact.insertion.hugging_face import LAYERED, as_pretrained, renamed, renumbered
from subnetact.operators.base import template_of
from subnetact.operators.view_module import module_class
from subnetact.spec import FLOAT32
from subnetact.supernet.batches import as_batch
from subnetact.supernet.card import Card
from subnetact.supernet.module_outputs import outputs_of
from subnetact.supernet.supernet import Supernet

OTHERWISE = (
    "choose the same size for all layers, or save the bundle, which from_pretrained(folder, subnet=...) loads"
)


def save_cut_out(
    supernet: Supernet, folder: StrPath, card: Card, only: Any, example: Any, shard_bytes: int
) -> None:
    """Write one subnet alone, as a model of its library's own class; see `Supernet.save_pretrained`.

    Raises:
        InsertError: no configuration of the class describes the subnet; the message names what differs.
    """
    if example is None:
        raise SpecError("only: give example=x, a batch on which the cut-out must compute the same")
    spec, kind = card.find(supernet.space, only), module_class(template_of(supernet.network))
    if not kind.__module__.startswith("transformers.") or spec.precision != FLOAT32:
        raise InsertError(
            f"{spec}: only a model of transformers can be cut out as one of its library, at float32; save "
            "the state_dict of supernet.extract(spec), or the bundle, which holds all subnets"
        )
    with replacing_folder(folder, "", "nothing") as place, without_progress_bars():
        save_alone(supernet.extract(spec), place, example=example, max_shard_size=shard_bytes)
        layered = json.loads((place / "config.json").read_bytes())["model_type"] == LAYERED
        model = {"library": "transformers", "name": kind.__name__, "layered": layered}
        facts = [f"license: {json.dumps(card.licence)}"] if card.licence else []
        lines = ["---", *facts, "library_name: transformers", "---", ""]
        lines += [f"# {kind.__name__}, cut out of an elastic model", "", "```python", *opening(model), "```"]
        (place / "README.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


def save_alone(subnet: Any, folder: Any, *args: Any, example: Any = None, **kwargs: Any) -> Any:
    """Write a view or an extracted network as `save_pretrained` of the class of its library does.

    Both must compute the same on an `example`, for which one is made up if the library says how.

    Raises:
        InsertError: no configuration describes the subnet, or it cannot be compared without an example.
    """
    training = [module for module in subnet.modules() if module.training]
    try:
        x = _inputs_of(subnet) if example is None else example
        found: Any = _plain(as_pretrained(subnet.eval(), x), x)
        if kwargs.get("state_dict") is not None:
            kwargs["state_dict"] = renamed(kwargs["state_dict"], renumbered(subnet))
    except Exception as error:  # Whatever a model says of inputs that are not for it.
        raise_if_explained(error, InsertError)
        if example is not None:
            raise
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


def _plain(model: Any, example: Any) -> nn.Module:
    """Return a model as its plain class in transformers builds it from its configuration, if that can."""
    if not getattr(model, "builds_each_layer", False):
        return model  # type: ignore[no-any-return]
    kind: Any = type(model).__mro__[1]
    config = copy.deepcopy(model.config)
    config.__class__ = kind.config_class
    try:
        found: Any = kind(config).to(next(model.parameters())).eval()
        found.load_state_dict(model.state_dict())
    except (RuntimeError, ValueError, TypeError, AttributeError):  # Most have layers of one size.
        return model  # type: ignore[no-any-return]
    if not equal(outputs_of(found, as_batch(example)), outputs_of(model, as_batch(example))):
        raise InsertError(
            f"{kind.__name__} in the shapes of this subnet computes something else: its layers depend on "
            f"their position, or on a number that no shape shows; {OTHERWISE}"
        )
    return found  # type: ignore[no-any-return]


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
