"""Supernets, views and extracts for the table of doors, and the ordinary models that they have to equal.

Nothing here asks an operator for values: an ordinary model of a small subnet has the first rows and columns
of the original's tensors, put into the class of the original by hand.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from small_decoders import small_decoder
from torch import Tensor, nn

import subnetact
from subnetact.engine.engine import Engine
from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.spec import SubnetSpec
from subnetact.supernet.check import check_once
from subnetact.supernet.statistics import batch_norms, statistics_of
from subnetact.supernet.supernet import Supernet

__all__ = ["KINDS", "Door", "body", "compute", "equal"]

IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(3, 15).view(2, 6)
LLAMA = {"num_hidden_layers": 3, "bos_token_id": None, "pad_token_id": 0}


@dataclass(frozen=True)
class Kind:
    """A model of another library, and the names of the layers that acts change."""

    name: str
    inputs: Tensor
    axes: tuple[str, ...]
    head: str
    """A layer whose inputs are elastic, the last one."""
    linear: str
    """A linear layer or convolution whose outputs are elastic."""
    inner: str
    """A module without an operator of its own, that holds elastic ones."""

    def original(self) -> nn.Module:
        """Return the model as its library makes it, with random weights that are always the same."""
        import timm

        torch.manual_seed(0)
        if self.name == "llama":
            return small_decoder("LlamaConfig", tie_word_embeddings=False, **LLAMA)
        if self.name == "tied":
            return small_decoder("LlamaConfig", tie_word_embeddings=True, **{**LLAMA, "num_hidden_layers": 2})
        if self.name == "vit":
            return timm.create_model("test_vit", num_classes=5, img_size=32, depth=2).eval()
        network = timm.create_model("test_resnet", num_classes=5).train()
        for norm in network.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.momentum = None
        with torch.no_grad():
            network(IMAGES)
        for norm in network.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.momentum = 0.1
        return network.eval()


KINDS = {
    kind.name: kind
    for kind in (
        Kind("llama", TOKENS, ("depth", "ffn", "heads"), "lm_head", "model.layers.0.mlp.up_proj", "model"),
        Kind("tied", TOKENS, ("ffn",), "lm_head", "model.layers.0.mlp.up_proj", "model"),
        Kind("resnet", IMAGES, ("width", "stream"), "fc", "layer2.0.conv1", "layer2"),
        Kind("vit", IMAGES, ("ffn", "stream"), "head", "blocks.0.mlp.fc1", "blocks.0"),
    )
}


@cache
def _made(name: str) -> tuple[nn.Module, Supernet]:
    kind = KINDS[name]
    supernet = subnetact.insert_(kind.original(), example=kind.inputs, axes=kind.axes)
    if batch_norms(supernet.network):
        subnetact.calibrate(supernet, supernet.space.sample(0, 3), [kind.inputs], progress=False)
    check_once(supernet, kind.inputs)
    return kind.original(), supernet


class Door:
    """One act's own copies of a supernet, its view and extract, an engine, and the ordinary models."""

    def __init__(self, kind: str, folder: Path) -> None:
        original, supernet = _made(kind)
        self._folder, self._folders = folder, itertools.count()
        self.kind, self.inputs = KINDS[kind], KINDS[kind].inputs
        self.original, self.supernet = copy.deepcopy(original), copy.deepcopy(supernet)
        self.small, self.large, self.middle = self.specs = supernet.space.sample(0, 3)

    def folder(self) -> Path:
        folder = self._folder / str(next(self._folders))
        folder.mkdir()
        return folder

    @cached_property
    def engine(self) -> Engine:
        return Engine(self.supernet, [self.small, self.large], example=self.inputs[:1], check=False)

    def cut(self, full: nn.Module, spec: SubnetSpec | None = None) -> nn.Module:
        """Return the ordinary model of a subnet, the small one if None, cut out of an ordinary full model."""
        shapes = _made(self.kind.name)[1].extract(spec or self.small)
        cut = copy.deepcopy(full)
        for path, module in list(cut.named_modules()):
            try:
                cut.get_submodule(path)
                like = shapes.get_submodule(path)
            except AttributeError:  # in a layer that is left out
                continue
            if isinstance(like, SkippedLayer):
                parent, _, name = path.rpartition(".")
                del cut.get_submodule(parent)[int(name) :]
                cut.config.num_hidden_layers = int(name)
                continue
            for name, tensor in {**module._parameters, **module._buffers}.items():
                wanted = getattr(like, name, None)
                if isinstance(tensor, Tensor) and isinstance(wanted, Tensor) and tensor.shape != wanted.shape:
                    part = tensor.detach()[tuple(map(slice, wanted.shape))].clone()
                    registry = module._parameters if name in module._parameters else module._buffers
                    own = nn.Parameter(part, tensor.requires_grad) if name in module._parameters else part
                    registry[name] = own
            for name in ("in_features", "out_features", "in_channels", "out_channels", "num_features"):
                if isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm2d) and hasattr(module, name):
                    setattr(module, name, getattr(like, name))
            if isinstance(module, nn.LayerNorm):
                module.normalized_shape = tuple(module.weight.shape)
        self._name_sizes(cut)
        for name, pair in statistics_of(self.supernet, spec or self.small).items():
            for statistic, tensor in zip(("running_mean", "running_var"), pair, strict=True):
                cut.get_submodule(name)._buffers[statistic] = tensor.clone()
        return cut

    def _name_sizes(self, cut: nn.Module) -> None:
        """Let an ordinary model say the sizes that it has."""
        if self.kind.name in ("llama", "tied"):
            layer = cut.model.layers[0]
            cut.config.intermediate_size = layer.mlp.intermediate_size = layer.mlp.up_proj.out_features
            cut.config.num_attention_heads = layer.self_attn.q_proj.out_features // cut.config.head_dim
            cut.config.num_key_value_heads = layer.self_attn.k_proj.out_features // cut.config.head_dim
        else:
            head = cut.get_submodule(self.kind.head)
            if isinstance(head, nn.Linear):
                cut.num_features = cut.head_hidden_size = head.in_features
            if self.kind.name == "vit":
                cut.embed_dim = cut.num_features
            if self.kind.name == "resnet":
                inputs = self.inputs.to(next(cut.parameters()).dtype)
                with torch.no_grad():
                    maps = copy.deepcopy(cut).eval().forward_intermediates(inputs, intermediates_only=True)
                for info, features in zip(cut.feature_info, maps, strict=True):
                    info["num_chs"] = features.shape[1]

    def blank(self, like: nn.Module) -> nn.Module:
        """Return an ordinary model of the sizes of a supernet, view or extract, whose values are all 0.1."""
        full = like is self.original or isinstance(like, Supernet) or is_full(like, self.original)
        blank = self.cut(self.original, self.large if full else self.small)
        with torch.no_grad():
            for tensor in itertools.chain(blank.parameters(), blank.buffers()):
                tensor.fill_(0.1 if tensor.is_floating_point() else 0)
        return blank

    def inputs_of(self, module: nn.Module) -> Tensor:
        return in_dtype_of(module, self.inputs)

    def run(self, module: Any) -> Any:
        return compute(module, self.inputs, **({"subnet": 0} if isinstance(module, Engine) else {}))

    def ordinary(self, column: str) -> nn.Module:
        """Return the ordinary model that the subject of a column has to equal."""
        return copy.deepcopy(self.original) if column == "supernet" else self.cut(self.original)

    def subject(self, column: str) -> Any:
        if column == "supernet":
            for spec in self.specs:  # views that are cached before the act
                self.supernet.subnet(spec)
            return self.supernet
        if column == "engine":
            return self.engine
        return self.supernet.subnet(self.small) if column == "view" else self.supernet.extract(self.small)

    def outputs(self) -> dict[str, Any]:
        with torch.no_grad():
            return {str(spec): compute(self.supernet, self.inputs, subnet=spec) for spec in self.specs}

    def served(self) -> list[Any]:
        return [compute(self.engine, self.inputs, subnet=i) for i in (0, 1)]

    def answers(self) -> dict[str, Any]:
        """Return what everybody else sees of the supernet: answers, names, shapes, modes and settings."""
        found: dict[str, Any] = {**self.outputs(), "engine": self.served()}
        network = self.supernet.network
        found["tensors"] = {n: (tuple(t.shape), t.requires_grad) for n, t in self.supernet.named_parameters()}
        found["modes"] = {n: m.training for n, m in self.supernet.named_modules()}
        found["state"] = {name: tensor.clone() for name, tensor in self.supernet.state_dict().items()}
        found["attention"] = getattr(getattr(network, "config", None), "_attn_implementation", None)
        for name in ("config", "generation_config", "feature_info", "pretrained_cfg", "num_features"):
            value = getattr(network, name, None)
            found[name] = repr(value.to_dict() if hasattr(value, "to_dict") else value)
        return found


def is_full(module: nn.Module, original: nn.Module) -> bool:
    return sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in original.parameters())


def body(module: nn.Module) -> nn.Module:
    """Return the network that has the names of a model's layers: a supernet holds it."""
    return module.network if isinstance(module, Supernet) else module


def in_dtype_of(module: nn.Module, inputs: Tensor) -> Tensor:
    dtypes = (t.dtype for t in itertools.chain(module.parameters(), module.buffers()))
    floating = (dtype for dtype in dtypes if dtype.is_floating_point)
    return inputs.to(next(floating, inputs.dtype)) if inputs.is_floating_point() else inputs


def compute(module: Any, inputs: Tensor, **options: Any) -> Any:
    """Return the output of a model or engine as tensors, for inputs of its own dtype."""
    if isinstance(module, nn.Module):
        inputs = in_dtype_of(module, inputs)
    output = module(inputs, **options)
    return getattr(output, "logits", output)


def equal(one: Any, other: Any, tolerance: float = 5e-5) -> bool:
    """Tell whether two results are the same: modules by their names, tensors within a tolerance."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.is_meta != other.is_meta:
            return False
        one, other = (t.detach().to(torch.float64) if not t.is_meta else t for t in (one, other))
        return one.is_meta or torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k], tolerance) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other, itertools.repeat(tolerance)))
    return bool(one == other)
