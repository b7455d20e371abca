"""Acts of others' tools that change the values, the dtypes, the modes or the modules of a model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from door_models import Door, body, compute
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from subnetact.supernet.supernet import Supernet

# -- dtypes, devices and modes --


def half(model: Any, door: Door) -> Any:
    return model.half()


def bfloat16(model: Any, door: Door) -> Any:
    return model.bfloat16()


def double(model: Any, door: Door) -> Any:
    return model.double()


def to_dtype(model: Any, door: Door) -> Any:
    return model.to(torch.float64)


def to_same_dtype(model: Any, door: Door) -> Any:
    return model.to("cpu", torch.float32).cpu().float()


def to_meta(model: Any, door: Door) -> Any:
    return all(tensor.is_meta for tensor in model.to("meta").state_dict().values())


def to_empty(model: Any, door: Door) -> Any:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    model.to_empty(device="cpu")
    for name, tensor in model.named_buffers():  # those that no state_dict has
        tensor.copy_(buffers[name])
    model.load_state_dict(state)


def double_of_a_parent(model: Any, door: Door) -> Any:
    nn.ModuleDict({"part": model}).double()


def double_by_swapping(model: Any, door: Door) -> Any:
    """Convert with the switch of torch that exchanges the tensors beneath the parameters."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def double_by_overwriting(model: Any, door: Door) -> Any:
    """Convert with the switch of torch that makes new parameters."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def double_a_copy(model: Any, door: Door) -> Any:
    return copy.deepcopy(model).double()


def train_mode(model: Any, door: Door) -> Any:
    with torch.no_grad():
        return [door.run(model.train()), door.run(model.eval())]


def assign_training(model: Any, door: Door) -> Any:
    """Set the mode as an attribute, as recipes for some layers do, and run."""
    for module in body(model).modules():
        module.training = True
    with torch.no_grad():
        output = door.run(model)
    for module in body(model).modules():
        module.training = False
    return output


def eval_mode(model: Any, door: Door) -> Any:
    return model.eval().training


def requires_grad_on(model: Any, door: Door) -> Any:
    return {p.requires_grad for p in model.requires_grad_(True).parameters()}


def requires_grad_off(model: Any, door: Door) -> Any:
    return {p.requires_grad for p in model.requires_grad_(False).parameters()}


def requires_grad_of_parameters(model: Any, door: Door) -> Any:
    """Set the attribute of each parameter, as recipes that freeze layers do."""
    for parameter in model.parameters():
        parameter.requires_grad = True


def zero_grad(model: Any, door: Door) -> Any:
    model.zero_grad()


# -- values --


def halve_in_place(model: Any, door: Door) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def initialise_one(model: Any, door: Door) -> Any:
    nn.init.constant_(body(model).get_parameter(f"{door.kind.head}.weight"), 0.1)


def _scale(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data.mul_(0.5)


def apply_by_weight(model: Any, door: Door) -> Any:
    model.apply(_scale)


def reset_parameters(model: Any, door: Door) -> Any:
    """Reset all norms, whose values are no random numbers."""
    for module in body(model).modules():
        if hasattr(module, "running_mean") and hasattr(module, "reset_parameters"):
            module.reset_parameters()


def assign_data(model: Any, door: Door) -> Any:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    if model.training is False:
        model.eval()  # where storage that was exchanged is noticed


def write_by_numpy(model: Any, door: Door) -> Any:
    for parameter in model.parameters():
        parameter.detach().numpy()[...] *= 0.5
    if isinstance(model, Supernet):
        model.verify(refresh=True)


def vector_to_parameters(model: Any, door: Door) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    model.eval()
    return vector


def clip_gradients(model: Any, door: Door) -> Any:
    door.run(model.train()).float().pow(2).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model.eval()
    return norm


def optimizer_step(model: Any, door: Door) -> Any:
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        door.run(model.train()).pow(2).mean().backward()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.eval()


def freeze_and_train(model: Any, door: Door) -> Any:
    body(model).get_submodule(door.kind.linear).requires_grad_(False)
    optimizer_step(model, door)


def gradient_hooks(model: Any, door: Door) -> Any:
    """Let each parameter be trained as soon as its gradient is there."""

    def step(parameter: Any) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    door.run(model.train()).pow(2).mean().backward()
    model.eval()


def replace_tensors(model: Any, door: Door) -> Any:
    """Put new tensors into the places of the former ones, one by one, as loaders of large models do."""
    from accelerate.utils import set_module_tensor_to_device

    for name, tensor in model.state_dict().items():
        set_module_tensor_to_device(model, name, "cpu", value=tensor * 0.5)


def trainer_step(model: Any, door: Door) -> Any:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": door.inputs[0], "labels": door.inputs[0]}] * 2
    arguments = TrainingArguments(
        str(door.folder()),
        max_steps=1,
        save_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_strategy="no",
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    model.eval()


def averaged_model(model: Any, door: Door) -> Any:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    other = door.blank(model)
    average.update_parameters(other)
    return average.module


def timm_average(model: Any, door: Door) -> Any:
    from timm.utils import ModelEmaV2, ModelEmaV3

    averages = [ModelEmaV2(model, decay=0.5), ModelEmaV3(model, decay=0.5)]
    for average in averages:
        average.update(model)
    return [door.run(average.module) for average in averages]


def update_bn(model: Any, door: Door) -> Any:
    from torch.optim.swa_utils import update_bn

    update_bn([door.inputs], model)


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
