"""Acts of others' tools that change the modules or the settings of a model."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from door_models import Door, body, compute
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from subnetact.supernet.supernet import Supernet

# -- modules --


def _layer(model: Any, door: Door) -> nn.Module:
    return body(model).get_submodule(door.kind.linear)


def _replace_head(model: Any, door: Door, head: nn.Module) -> None:
    setattr(body(model), door.kind.head, head)


def new_head(model: Any, door: Door) -> Any:
    head = nn.Linear(body(model).get_submodule(door.kind.head).in_features, 3)
    nn.init.constant_(head.weight, 0.1), nn.init.constant_(head.bias, 0.2)
    _replace_head(model, door, head)
    if isinstance(model, Supernet):
        door.supernet(door.inputs, subnet=door.small)


def new_head_on_itself(model: Any, door: Door) -> Any:
    """Assign to the object in hand, whatever it is."""
    setattr(model, door.kind.head, nn.Identity())


def identity_head(model: Any, door: Door) -> Any:
    _replace_head(model, door, nn.Identity())


def scaled_layer(model: Any, door: Door) -> Any:
    """Put a layer of one's own into the place of a block."""
    parent, _, name = door.kind.inner.rpartition(".")
    inner = body(model).get_submodule(door.kind.inner)
    setattr(body(model).get_submodule(parent), name, nn.Sequential(inner, nn.Tanh()))


def set_submodule(model: Any, door: Door) -> Any:
    model.set_submodule(door.kind.head, nn.Identity())


def write_modules(model: Any, door: Door) -> Any:
    """Write into the dictionary of submodules."""
    body(model)._modules[door.kind.head] = nn.Identity()


class Louder:
    """Doubles what a layer computes."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2  # type: ignore[misc]


def swap_class(model: Any, door: Door) -> Any:
    """Give a layer another class in place, as sharding and quantising do."""
    head = body(model).get_submodule(door.kind.head)
    head.__class__ = type("Louder", (Louder, type(head)), {})


def exchange_tensors(model: Any, door: Door) -> Any:
    """Exchange a parameter with another tensor beneath its name."""
    weight = body(model).get_submodule(door.kind.head).weight
    other = nn.Parameter(torch.full_like(weight, 0.1), requires_grad=weight.requires_grad)
    torch.utils.swap_tensors(weight, other)


def remove_last_layer(model: Any, door: Door) -> Any:
    """Leave out the last layer that the model has."""
    layers = model.model.layers
    last = max(i for i, layer in enumerate(layers) if list(layer.parameters()))
    del layers[last:]
    model.config.num_hidden_layers = last


def set_input_size(model: Any, door: Door) -> Any:
    model.set_input_size(img_size=48)
    with torch.no_grad():
        return compute(model, torch.ones(1, 3, 48, 48))


def delete_module(model: Any, door: Door) -> Any:
    delattr(body(model), door.kind.head)
    return hasattr(body(model), door.kind.head)


def delete_bias(model: Any, door: Door) -> Any:
    body(model).get_submodule(door.kind.head).register_parameter("bias", None)


def reset_classifier(model: Any, door: Door) -> Any:
    body(model).reset_classifier(3)
    if isinstance(model, Supernet):
        door.supernet(door.inputs, subnet=door.small)
    return tuple(door.run(model).shape)


def register_buffer(model: Any, door: Door) -> Any:
    body(model).register_buffer("note", torch.ones(2), persistent=False)
    return dict(body(model).named_buffers())["note"]


def register_parameter(model: Any, door: Door) -> Any:
    body(model).register_parameter("note", nn.Parameter(torch.ones(2)))
    return body(model).note


def assign_parameter(model: Any, door: Door) -> Any:
    head = body(model).get_submodule(door.kind.head)
    head.bias = nn.Parameter(torch.ones_like(head.bias))


def assign_weight(model: Any, door: Door) -> Any:
    head = body(model).get_submodule(door.kind.head)
    head.weight = nn.Parameter(torch.full_like(head.weight, 0.1))


def write_registry(model: Any, door: Door) -> Any:
    """Write into the dictionary of parameters, as offloading, sharding and old parametrisations do."""
    own: Any = body(model).get_submodule(door.kind.head)._parameters
    own["weight"] = nn.Parameter(torch.full_like(own["weight"], 0.1))


def add_module(model: Any, door: Door) -> Any:
    body(model).add_module("note", nn.Linear(2, 2))
    return [name for name, _ in body(model).named_children()]


def wrap_forward(model: Any, door: Door) -> Any:
    """Replace the forward method of a layer by a function, as many adapters do."""
    head = body(model).get_submodule(door.kind.head)
    plain = head.forward
    head.forward = lambda x: plain(x) * 2
    if isinstance(model, Supernet):
        model.refresh()  # as it says: plain attributes are not noticed


def resize_token_embeddings(model: Any, door: Door) -> Any:
    body(model).resize_token_embeddings(47)
    return tuple(door.run(model).shape)


def set_input_embeddings(model: Any, door: Door) -> Any:
    torch.manual_seed(0)
    body(model).set_input_embeddings(nn.Embedding(50, 16))


def tie_weights(model: Any, door: Door) -> Any:
    body(model).tie_weights()
    return len(list(body(model).parameters()))


def prune_one(model: Any, door: Door) -> Any:
    prune.l1_unstructured(_layer(model, door), "weight", 0.5)


def prune_and_remove(model: Any, door: Door) -> Any:
    prune.remove(prune.l1_unstructured(_layer(model, door), "weight", 0.5), "weight")


def prune_global(model: Any, door: Door) -> Any:
    layers = [(_layer(model, door), "weight"), (body(model).get_submodule(door.kind.head), "weight")]
    prune.global_unstructured(layers, prune.L1Unstructured, amount=0.5)


class Doubled(nn.Module):
    def forward(self, weight: Any) -> Any:
        return weight * 2


def register_parametrization(model: Any, door: Door) -> Any:
    parametrize.register_parametrization(_layer(model, door), "weight", Doubled())


def weight_norm(model: Any, door: Door) -> Any:
    parametrizations.weight_norm(_layer(model, door))


def old_weight_norm(model: Any, door: Door) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(_layer(model, door))


def spectral_norm(model: Any, door: Door) -> Any:
    torch.manual_seed(0)
    parametrizations.spectral_norm(_layer(model, door))


def old_spectral_norm(model: Any, door: Door) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.spectral_norm(_layer(model, door))


def quantize_dynamic(model: Any, door: Door) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def quantize_by_torchao(model: Any, door: Door) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def convert_sync_batchnorm(model: Any, door: Door) -> Any:
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return sum(isinstance(module, nn.SyncBatchNorm) for module in converted.modules())


def freeze_batch_norm(model: Any, door: Door) -> Any:
    from timm.layers import freeze_batch_norm_2d

    frozen = freeze_batch_norm_2d(model)
    return sum("Frozen" in type(module).__name__ for module in frozen.modules())


def fuse_conv_bn(model: Any, door: Door) -> Any:
    fused = nn.utils.fusion.fuse_conv_bn_eval(body(model).layer2[0].conv1, body(model).layer2[0].bn1)
    body(model).layer2[0].conv1, body(model).layer2[0].bn1 = fused, nn.Identity()


def offload(model: Any, door: Door) -> Any:
    """Keep the weights elsewhere and bring each layer's to it when it runs."""
    from accelerate import cpu_offload

    cpu_offload(model, execution_device="cpu")


def low_rank_adapters(model: Any, door: Door) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False)
    return get_peft_model(model, config).eval()


def fully_shard(model: Any, door: Door) -> Any:
    from torch.distributed.fsdp import fully_shard

    layers = list(body(model).get_submodule("model.layers"))
    for layer in layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    with torch.no_grad():
        return door.run(model)


# -- settings --


def change_epsilon(model: Any, door: Door) -> Any:
    """Change a setting of all norms."""
    for module in body(model).modules():
        if hasattr(module, "eps"):
            module.eps = 1.0
    if isinstance(model, Supernet):
        model.refresh()


def change_setting(model: Any, door: Door) -> Any:
    """Change a number that a forward reads."""
    body(model).model.layers[0].self_attn.scaling *= 3
    if isinstance(model, Supernet):
        model.refresh()


def set_attention(model: Any, door: Door) -> Any:
    model.set_attn_implementation("eager")
    return model.config._attn_implementation


def set_configuration(model: Any, door: Door) -> Any:
    model.config.use_cache = False
    model.config.output_hidden_states = True
    model.generation_config.max_new_tokens = 2
    return type(model(door.inputs).hidden_states)


def set_feature_info(model: Any, door: Door) -> Any:
    model.feature_info[0]["num_chs"] = 99
    model.pretrained_cfg["mean"] = 7


def wrap_for_checkpointing(model: Any, door: Door) -> Any:
    """Put wrappers around blocks, which compute them again on the way back."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    chosen = ("LlamaDecoderLayer",)
    wrapper.apply_activation_checkpointing(body(model), check_fn=lambda m: type(m).__name__ in chosen)
    return [type(module).__name__ for module in body(model).modules()].count("CheckpointWrapper") > 0


def set_checkpointing(model: Any, door: Door) -> Any:
    if hasattr(body(model), "set_grad_checkpointing"):
        body(model).set_grad_checkpointing()
    else:
        body(model).gradient_checkpointing_enable()
    door.run(model.train()).pow(2).mean().backward()
    gradient = body(model).get_parameter(f"{door.kind.head}.weight").grad
    model.zero_grad()
    model.eval()
    return gradient


def set_input_gradients(model: Any, door: Door) -> Any:
    body(model).enable_input_require_grads()
    return door.run(model).requires_grad


def plain_attribute(model: Any, door: Door) -> Any:
    body(model).note = [1]
    return body(model).note
