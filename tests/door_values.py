"""Acts of others' tools that change the values, the dtypes and the modes of a model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from door_models import Door, body
from torch import nn

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


def initialise_by_class(model: Any, door: Door) -> Any:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 0.3)
        elif isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.constant_(module.weight, 0.01)


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
        model.refresh()


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
