"""Makes the network that a bundle names, by the factories of the libraries that are listed here.

A file chooses among these libraries and, inside of a library, among the names that the library lists itself.
It cannot name a module, a file, an address or a function, and its arguments are plain values.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from subnetact.errors import FileFormatError, SpecError
from subnetact.files.atomic import read_regular
from subnetact.files.documents import parse_json
from subnetact.operators.base import template_of

BYTES_PER_WEIGHT_BYTE = 4
"""A network may take this many times the bytes of its weights while it is built, and `EXTRA_BYTES` more."""
EXTRA_BYTES = 2**24
BYTES_PER_TENSOR = 2**10
"""What a tensor takes besides its values; it bounds the number of tiny ones."""
MOST = {"layer": 1_000, "label": 1_000_000}
"""The largest number in a field of a configuration whose name speaks of layers or of labels."""
SCALARS = (bool, int, float, str, type(None))
REFUSED_ARGUMENTS = (
    "pretrained", "checkpoint", "cache", "weights", "overlay", "scriptable", "features_only", "url", "file",
)  # fmt: skip
"""Parts of the names of arguments with which a factory would read or fetch other files."""
IGNORED_FIELDS = (
    "auto_map", "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
    "quantization_config", "custom_generate",
)  # fmt: skip
"""Fields of configurations of transformers with which it may run code that is not its own."""
ATTENTIONS = ("eager", "sdpa")


def ordinary(module: nn.Module) -> Any:
    """Return a network without its operators, on the same tensors; the network itself stays as it is."""
    found: dict[int, nn.Module] = {}

    def plain(inner: nn.Module) -> nn.Module:
        if id(inner) not in found:
            made = found[id(inner)] = copy(template_of(inner))
            made._modules = {n: None if c is None else plain(c) for n, c in inner._modules.items()}
        return found[id(inner)]

    return plain(module)


def factory_of(network: nn.Module, given: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the factory of an ordinary network, after a try; None for a network that only its user can make.

    Raises:
        SpecError: a factory is given that makes another network, or the configuration of a network of
            transformers states other shapes than it has.
    """
    for factory in [dict(given)] if given else _candidates(network):
        try:
            made = make_network(factory, getattr(network, "config", None), None)
        except (FileFormatError, ImportError) as error:
            if given:
                raise SpecError(f"factory: {error}") from error
            continue
        shapes = [{n: t.shape for n, t in m.state_dict().items()} for m in (network, made)]
        if type(made) is type(network) and str(made) == str(network) and shapes[0] == shapes[1]:
            return factory
        wrong = [n for n, shape in shapes[0].items() if shapes[1].get(n, shape) != shape]
        if wrong and factory["library"] == "transformers" and not given:
            name, (shape, stated) = wrong[0], (tuple(s[wrong[0]]) for s in shapes)
            raise SpecError(
                f"{name} is {shape}, and {stated} in the {type(network).__name__} that its configuration "
                "describes; give network.config the sizes that the network has, so that its library can open "
                "the folder"
            )
    if given:
        raise SpecError(
            f"factory: {given['library']} makes another network of {given['name']!r} than this "
            f"{type(network).__name__}; give the arguments that it was made with"
        )
    return None


def make_network(factory: Any, config: Any, size: int | None) -> nn.Module:
    """Return the network of a factory, with weights that are not set, in evaluation mode.

    Args:
        factory: `library`, `name` and `arguments`.
        config: the folder with the `config.json` of a model of transformers, or a configuration.
        size: the bytes of its weights, which bound what it may take. If None, it takes no memory.

    Raises:
        FileFormatError: there is no such library or name, or it cannot make a network of this.
        ImportError: the library is not installed.
    """
    library, name, arguments = factory["library"], factory["name"], factory["arguments"]
    make = _LIBRARIES.get(library)
    if make is None:
        raise FileFormatError(f"library {library!r:.60} is not known; choose from {', '.join(_LIBRARIES)}")
    refused = [a for a, v in arguments.items() if library in _NAMED and not _harmless(a, v)]
    if not isinstance(name, str) or refused:
        raise FileFormatError(f"{library}: no factory is called {name!r:.60}, or not with {refused}")
    try:
        with torch.device("meta" if size is None else "cpu"), _Unset(size):
            network = make(name, dict(arguments), config)
            if not isinstance(network, nn.Module):
                raise FileFormatError(f"{library}: {name!r} makes no network")
            return network.eval()
    except (FileFormatError, ImportError, MemoryError):
        raise
    except Exception as error:  # Whatever a library says of arguments that it cannot take.
        raise FileFormatError(
            f"cannot rebuild {name!r:.60} of {library} ({type(error).__name__}: {error!s:.200})"
        ) from error


def _candidates(network: nn.Module) -> list[dict[str, Any]]:
    """Return the factories that may have made a network, the likeliest first."""
    kind, given = type(network), network.__dict__
    home = kind.__module__.split(".")[0]
    if home == "transformers":
        attention = getattr(getattr(network, "config", None), "_attn_implementation", None)
        arguments = {"attention": attention} if attention in ATTENTIONS else {}
        return [{"library": home, "name": kind.__name__, "arguments": arguments}]
    if home == "timm":
        made_with = {"num_classes": given.get("num_classes"), **given.get("_model_args", {})}
        name = (given.get("pretrained_cfg") or {}).get("architecture")
        harmless = {a: v for a, v in made_with.items() if _harmless(a, v)}
        return [{"library": home, "name": name, "arguments": harmless}] if name else []
    if home == "torchvision":
        last = [m.out_features for m in network.modules() if isinstance(m, nn.Linear)][-1:]
        names = [n for n in getattr(sys.modules[kind.__module__], "__all__", ()) if n.islower()]
        tries = [{}, *({"num_classes": n} for n in last)]
        return [{"library": home, "name": n, "arguments": a} for n in names for a in tries]
    return []


def _harmless(name: str, value: Any) -> bool:
    """Tell whether a factory of vision models may get an argument of a file."""
    values = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(v, SCALARS) for v in values) and not any(p in name for p in REFUSED_ARGUMENTS)


# -- libraries --------------------------------------------------------------------------------------


def _of_subnetact(name: str, arguments: dict[str, Any], _: Any) -> Any:
    from subnetact.digits import new_digits_supernet

    if name != "digits" or arguments:
        raise FileFormatError(f"subnetact has no network {name!r:.60}; it has 'digits', without arguments")
    return new_digits_supernet()


def _of_transformers(name: str, arguments: dict[str, Any], config: Any) -> Any:
    import transformers

    kind: Any = getattr(transformers, name, None)
    model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not model or not kind.config_class:
        raise FileFormatError(f"transformers has no model {name!r:.60}; update transformers")
    if isinstance(config, Path):
        stated = _harmless_fields(parse_json(read_regular(config / "config.json")))
        config = kind.config_class.from_dict(stated)
        config._attn_implementation = arguments.get("attention")
        if config._attn_implementation not in (*ATTENTIONS, None):
            raise FileFormatError(f"attention {arguments['attention']!r:.60}; choose from {ATTENTIONS}")
    return kind(deepcopy(config))


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Let transformers draw no progress bars meanwhile."""
    from transformers.utils import logging as of_transformers

    logging: Any = of_transformers
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def under_runtime_names(network: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights in files under the names that a model of transformers has while it runs.

    transformers writes some models as they were first published, each expert apart for example, and puts
    them together on loading; what is put together is then in memory, and not mapped.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    factory = {"library": "transformers", "name": type(network).__name__, "arguments": {}}
    shell: Any = make_network(factory, network.config, None)
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        shell.to(kinds.pop())
    rules: Any = get_model_conversion_mapping(shell)
    settings = LoadStateDictConfig(weight_mapping=rules)
    with without_progress_bars():
        told, _ = convert_and_load_state_dict_in_model(shell, dict(tensors), settings)
    found = {name: tensor for name, tensor in shell.state_dict().items() if not tensor.is_meta}
    return {**{name: tensors[name] for name in told.unexpected_keys if name in tensors}, **found}


def _harmless_fields(stated: Any) -> Any:
    """Return the fields of a configuration without those that may run code, and no absurd depth."""
    if isinstance(stated, list):
        return [_harmless_fields(inner) for inner in stated]
    if not isinstance(stated, dict):
        return stated
    for field, value in stated.items():
        most = min((number for word, number in MOST.items() if word in field), default=value)
        if isinstance(value, int | float) and not (most == value or -1 <= value <= most):
            raise FileFormatError(f"config.json: {field} is {value!r:.60}; at most {most}")
    return {field: _harmless_fields(value) for field, value in stated.items() if field not in IGNORED_FIELDS}


def _of_timm(name: str, arguments: dict[str, Any], _: Any) -> Any:
    import timm

    if not timm.is_model(name) or ":" in name or "/" in name:
        raise FileFormatError(f"timm has no model {name!r:.60}; update timm")
    return timm.create_model(name, pretrained=False, **arguments)


def _of_torchvision(name: str, arguments: dict[str, Any], _: Any) -> Any:
    from torchvision import models

    if name not in models.list_models():
        raise FileFormatError(f"torchvision has no model {name!r:.60}; update torchvision")
    builder = models.get_model_builder(name)
    unset = {p: None for p in inspect.signature(builder).parameters if p.startswith("weights")}
    return builder(**unset, **arguments)


_LIBRARIES: dict[str, Callable[[str, dict[str, Any], Any], Any]] = {
    "subnetact": _of_subnetact,
    "ofa_adapters": lambda name, given, _: import_module("ofa_adapters").load(name, None, **given),
    "transformers": _of_transformers,
    "timm": _of_timm,
    "torchvision": _of_torchvision,
}
_NAMED = ("timm", "torchvision")
"""Libraries that give all arguments to functions of their own."""


class _Unset(TorchFunctionMode):
    """Leaves new parameters as they are, which saves time, and bounds the bytes of all new tensors."""

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self._limit = self._left = 2**63 if size is None else EXTRA_BYTES + BYTES_PER_WEIGHT_BYTE * size

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, (target, *_) = getattr(func, "__name__", ""), (*args, (kwargs or {}).get("tensor"))
        if name.endswith("_") and not name.endswith("__") and isinstance(target, nn.Parameter):
            return target if name != "requires_grad_" else func(*args, **(kwargs or {}))
        if func in _MAKE_TENSORS:
            self._left -= BYTES_PER_TENSOR + func(*args, **{**(kwargs or {}), "device": "meta"}).nbytes
            if self._left < 0:
                raise FileFormatError(f"these arguments describe a network of more than {self._limit} bytes")
        return func(*args, **(kwargs or {}))


_MAKE_TENSORS = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye}
_MAKE_TENSORS |= {torch.arange}
