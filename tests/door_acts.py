"""Acts of others' tools on a model: an act takes a model and its `Door`, and returns what is compared.

That is a module, which is then run, or values.
"""

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from door_models import Door, body, compute
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.utils import parametrize, prune

from subnetact.supernet.supernet import Supernet

__all__ = ["act_of"]


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def _replace_head(model: Any, door: Door, head: nn.Module) -> None:
    setattr(body(model), door.kind.head, head)


class Louder:
    """Doubles what a layer computes."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2  # type: ignore[misc]


class Doubled(nn.Module):
    def forward(self, weight: Any) -> Any:
        return weight * 2


def halved(module: nn.Module) -> dict[str, Any]:
    return {name: tensor * 0.5 for name, tensor in module.state_dict().items()}


def load_halved(module: nn.Module) -> None:
    module.load_state_dict(halved(module))


def filled(door: Door, model: nn.Module, state: Any) -> nn.Module:
    """Return another model of the same sizes with the values of a state."""
    other = door.blank(model)
    other.load_state_dict(state)
    return other


def head_of(model: Any, door: Door) -> Any:
    return body(model).get_submodule(door.kind.head)


def norms_in(module: nn.Module, kind: str) -> int:
    return sum(kind in type(each).__name__ for each in module.modules())


def parameters_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, nn.Parameter)}


GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads")


def _layer(model: Any, door: Door) -> nn.Module:
    return body(model).get_submodule(door.kind.linear)


def load_named_tensors(model: Any, door: Door) -> Any:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {n: t.detach() * 0.5 for n, t in tensors.items() if "inv_freq" not in n}
    model.load_state_dict(kept, strict=False)


def load_without_tied_name(model: Any, door: Door) -> Any:
    state = {n: t * 0.5 for n, t in model.state_dict().items() if n != "lm_head.weight"}
    model.load_state_dict(state, strict=isinstance(model, Supernet))


def saved_tensor_hides_nothing(model: Any, door: Door) -> Any:
    loaded = torch.load(_saved(model.state_dict()), weights_only=True)
    return {name: t.untyped_storage().nbytes() for name, t in loaded.items()}


def safetensors_save_model(model: Any, door: Door) -> Any:
    folder = door.folder()
    from safetensors.torch import load_model, save_model

    save_model(model, str(folder / "model.safetensors"))
    load_model(other := door.blank(model), str(folder / "model.safetensors"))
    return other


def safetensors_load_model(model: Any, door: Door) -> Any:
    folder = door.folder()
    from safetensors.torch import load_model, save_model

    other = door.blank(model)
    save_model(other, str(folder / "model.safetensors"))
    load_model(model, str(folder / "model.safetensors"))


def save_pretrained(model: Any, door: Door) -> Any:
    folder = door.folder()
    model.save_pretrained(folder / "saved")
    return type(door.original).from_pretrained(folder / "saved").eval()


def push_to_hub(model: Any, door: Door) -> Any:
    """Push without a network: what would be uploaded is opened."""
    from transformers.utils import hub

    opened: list[Any] = []

    def upload(self: Any, folder: Any, *_: Any, **__: Any) -> None:
        opened.append(type(door.original).from_pretrained(folder).eval())

    api = mock.Mock(upload_folder=lambda folder_path, **_: upload(None, folder_path))
    with (
        mock.patch("huggingface_hub.HfApi", return_value=api),
        mock.patch.object(hub.PushToHubMixin, "_upload_modified_files", upload),
        mock.patch.object(hub, "hf_api"),
        mock.patch.object(hub, "create_and_tag_model_card"),
    ):
        model.push_to_hub("me/model")
    return opened[0]


def timm_save_for_hub(model: Any, door: Door) -> Any:
    folder = door.folder()
    import timm

    timm.models.save_for_hf(model, folder / "hub", model_config={"num_classes": 5})
    return timm.create_model(f"local-dir:{folder / 'hub'}", pretrained=True).eval()


def distributed_checkpoint(model: Any, door: Door) -> Any:
    folder = door.folder()
    from torch.distributed import checkpoint

    checkpoint.save(model.state_dict(), checkpoint_id=folder / "dcp", no_dist=True)
    other = door.blank(model)
    checkpoint.load(state := other.state_dict(), checkpoint_id=folder / "dcp", no_dist=True)
    other.load_state_dict(state)
    return other


def state_of_a_parent(model: Any, door: Door) -> Any:
    parent, other = nn.ModuleDict({"part": model}), door.blank(model)
    nn.ModuleDict({"part": other}).load_state_dict(parent.state_dict())
    return other


def names_of_state_resolve(model: Any, door: Door) -> Any:
    values = {}
    for name, tensor in model.state_dict().items():
        try:
            values[name] = model.get_parameter(name)
        except AttributeError:
            values[name] = model.get_buffer(name)
        assert torch.equal(values[name], tensor), name
        model.get_submodule(name.rpartition(".")[0])
    return values


def insert_again(model: Any, door: Door) -> Any:
    """Make the model elastic, once more if it was cut out of an elastic one."""
    import subnetact

    supernet = subnetact.insert_(model, example=door.inputs, axes=("ffn",))
    return supernet.subnet(supernet.space.smallest())


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


def requires_grad_of_parameters(model: Any, door: Door) -> Any:
    """Set the attribute of each parameter, as recipes that freeze layers do."""
    for parameter in model.parameters():
        parameter.requires_grad = True


def halve_in_place(model: Any, door: Door) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


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


def optimizer_step(model: Any, door: Door) -> Any:
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        door.run(model.train()).pow(2).mean().backward()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.eval()


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


def update_bn(model: Any, door: Door) -> Any:
    from torch.optim.swa_utils import update_bn

    update_bn([door.inputs], model)


def new_head(model: Any, door: Door) -> Any:
    head = nn.Linear(head_of(model, door).in_features, 3)
    nn.init.constant_(head.weight, 0.1), nn.init.constant_(head.bias, 0.2)
    _replace_head(model, door, head)
    if isinstance(model, Supernet):
        door.supernet(door.inputs, subnet=door.small)


def new_head_on_itself(model: Any, door: Door) -> Any:
    """Assign to the object in hand, whatever it is."""
    setattr(model, door.kind.head, nn.Identity())


def scaled_layer(model: Any, door: Door) -> Any:
    """Put a layer of one's own into the place of a block."""
    parent, _, name = door.kind.inner.rpartition(".")
    inner = body(model).get_submodule(door.kind.inner)
    setattr(body(model).get_submodule(parent), name, nn.Sequential(inner, nn.Tanh()))


def write_modules(model: Any, door: Door) -> Any:
    """Write into the dictionary of submodules."""
    body(model)._modules[door.kind.head] = nn.Identity()


def swap_class(model: Any, door: Door) -> Any:
    """Give a layer another class in place, as sharding and quantising do."""
    head = head_of(model, door)
    head.__class__ = type("Louder", (Louder, type(head)), {})


def exchange_tensors(model: Any, door: Door) -> Any:
    """Exchange a parameter with another tensor beneath its name."""
    weight = head_of(model, door).weight
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


def assign_weight(model: Any, door: Door) -> Any:
    head = head_of(model, door)
    head.weight = nn.Parameter(torch.full_like(head.weight, 0.1))


def write_registry(model: Any, door: Door) -> Any:
    """Write into the dictionary of parameters, as offloading, sharding and old parametrisations do."""
    own: Any = head_of(model, door)._parameters
    own["weight"] = nn.Parameter(torch.full_like(own["weight"], 0.1))


def wrap_forward(model: Any, door: Door) -> Any:
    """Replace the forward method of a layer by a function, as many adapters do."""
    head = head_of(model, door)
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


def prune_and_remove(model: Any, door: Door) -> Any:
    prune.remove(prune.l1_unstructured(_layer(model, door), "weight", 0.5), "weight")


def prune_global(model: Any, door: Door) -> Any:
    layers = [(_layer(model, door), "weight"), (head_of(model, door), "weight")]
    prune.global_unstructured(layers, prune.L1Unstructured, amount=0.5)


def register_parametrization(model: Any, door: Door) -> Any:
    parametrize.register_parametrization(_layer(model, door), "weight", Doubled())


def old_weight_norm(model: Any, door: Door) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(_layer(model, door))


def quantize_dynamic(model: Any, door: Door) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


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


def call_by_name(model: Any, door: Door) -> Any:
    mask = torch.ones_like(door.inputs)
    output = model(input_ids=door.inputs, attention_mask=mask, output_hidden_states=True)
    return [output.logits, output.hidden_states[0], output.hidden_states[-1]]  # Skipped layers repeat others.


def autocast(model: Any, door: Door) -> Any:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return door.run(model)


def inference_mode(model: Any, door: Door) -> Any:
    with torch.inference_mode():
        return door.run(model)


def forward_in_a_child(model: Any, door: Door) -> Any:
    """Fork, and let the child run the model."""
    with torch.no_grad():
        here, (read, write) = door.run(model), os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a process that has threads
            child = os.fork()
        if not child:
            try:
                os.write(write, b"same" if torch.equal(door.run(model), here) else b"other")
            finally:
                os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    return os.read(read, 9)


def two_threads(model: Any, door: Door) -> Any:
    outputs: list[Any] = [None, None]

    def work(i: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                outputs[i] = door.run(model)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outputs


def same_dropout(model: Any, door: Door) -> Any:
    for module in body(model).modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    model.train()
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(door.run(model).detach())
    model.eval()
    return outputs


def input_gradient(model: Any, door: Door) -> Any:
    x = door.inputs.clone().requires_grad_()
    return torch.autograd.grad(compute(model, x).pow(2).sum(), x)[0]


def torch_checkpoint(model: Any, door: Door) -> Any:
    from torch.utils.checkpoint import checkpoint

    x = door.inputs.clone().requires_grad_()
    return torch.autograd.grad(checkpoint(model, x, use_reentrant=False).pow(2).sum(), x)[0]


def distributed_data_parallel(model: Any, door: Door) -> Any:
    wrapped = nn.parallel.DistributedDataParallel(model.train())
    door.run(wrapped).pow(2).mean().backward()
    gradient = body(model).get_parameter(f"{door.kind.head}.weight").grad
    model.zero_grad()
    model.eval()
    return gradient


def accelerate_prepare(model: Any, door: Door) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(door.run(prepared.train()).pow(2).mean())
    optimizer.step()
    accelerator.unwrap_model(prepared).eval()


def prepare_at_lower_precision(model: Any, door: Door) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    with torch.no_grad():
        return door.run(prepared)


def pipeline(model: Any, door: Door) -> Any:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")
    run = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    return run("w3 w4 w5", max_new_tokens=4, do_sample=False)[0]["generated_text"]


def functional_call(model: Any, door: Door) -> Any:
    return [torch.func.functional_call(model, halved(model), (door.inputs,), {}), door.run(model)]


def functional_call_meanwhile(model: Any, door: Door) -> Any:
    """Run another subnet while a functional call is on its way, as another thread may."""
    seen: list[bool] = []
    before = compute(door.supernet, door.inputs, subnet=door.middle)

    def look(*_: Any) -> None:
        seen.append(torch.equal(compute(door.supernet, door.inputs, subnet=door.middle), before))

    handle = model.register_forward_pre_hook(look)
    with torch.no_grad():
        torch.func.functional_call(model, halved(model), (door.inputs,))
    handle.remove()
    return seen


def ensemble(model: Any, door: Door) -> Any:
    """Run two models at once by vmap over functional calls."""
    name = f"{door.kind.head}.weight"
    weight = model.state_dict()[name]

    def run(weight: Any) -> Any:
        output = torch.func.functional_call(model, {name: weight}, (door.inputs,))
        return getattr(output, "logits", output)

    with torch.no_grad():
        return torch.vmap(run)(torch.stack([weight, weight * 0.5]))


def number_of_features(model: Any, door: Door) -> Any:
    with torch.no_grad():
        features = model.forward_features(door.inputs)
    last = features.shape[-1 if features.dim() == 3 else 1]
    return [model.num_features == last, model.head_hidden_size == last, model.num_classes]


def feature_information(model: Any, door: Door) -> Any:
    with torch.no_grad():
        maps = model.forward_intermediates(door.inputs, intermediates_only=True, output_fmt="NCHW")
    return [
        info["num_chs"] == x.shape[1] for info, x in zip(model.feature_info[-len(maps) :], maps, strict=True)
    ]


def count_flops(model: Any, door: Door) -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        door.run(model)
    return counter.get_total_flops()


def profiler(model: Any, door: Door) -> Any:
    with torch.profiler.profile() as profile, torch.no_grad():
        output = door.run(model)
    assert len(profile.key_averages())
    return output


def hook_of_a_layer(model: Any, door: Door) -> Any:
    """Look at the inputs and outputs of a layer that is elastic."""
    seen: list[Any] = []
    layer = body(model).get_submodule(door.kind.linear)
    handles = [
        layer.register_forward_pre_hook(lambda m, args: seen.append(args[0])),
        layer.register_forward_hook(lambda m, args, y: seen.append(y)),
    ]
    with torch.no_grad():
        door.run(model)
    for handle in handles:
        handle.remove()
    return seen


def hook_of_the_root(model: Any, door: Door) -> Any:
    seen: list[Any] = []
    handle = model.register_forward_hook(lambda m, x, y: seen.append(1))
    door.run(model)
    handle.remove()
    return seen


def changing_hook(model: Any, door: Door) -> Any:
    """Let a hook change the output of a module, and leave it there."""
    layer = body(model).get_submodule(door.kind.inner)
    layer.register_forward_hook(lambda m, x, y: y * 2)


def backward_hook(model: Any, door: Door) -> Any:
    seen: list[Any] = []
    layer = body(model).get_submodule(door.kind.linear)
    layer.register_full_backward_hook(lambda m, before, after: seen.append(after[0]))
    x = door.inputs.clone().requires_grad_()
    compute(model, x).pow(2).sum().backward()
    return seen


def global_hook(model: Any, door: Door) -> Any:
    seen: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, x, y: seen.append(1) if isinstance(m, nn.Linear | nn.Conv2d) else None
    )
    try:
        door.run(model)
    finally:
        handle.remove()
    return len(seen)


def operations_trace(model: Any, door: Door) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return make_fx(model)(door.inputs)(door.inputs)


def feature_extractor(model: Any, door: Door) -> Any:
    from torchvision.models.feature_extraction import create_feature_extractor

    return create_feature_extractor(model, {"layer2": "a", "layer4": "b"})(door.inputs)


def script_trace(model: Any, door: Door) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, (door.inputs,))


def script(model: Any, door: Door) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(model)


def onnx(model: Any, door: Door) -> Any:
    import onnxruntime

    path = door.folder() / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (door.inputs,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: door.inputs.numpy()})[0])


def compiled_in_place(model: Any, door: Door) -> Any:
    torch._dynamo.reset()
    model.compile(backend="eager")
    with torch.no_grad():
        return door.run(model)


def compiled(model: Any, door: Door) -> Any:
    """Compile a model, and tell what it computes and whether its graphs ran."""
    ran: list[Any] = []
    torch._dynamo.reset()

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: (ran.append(1), graph(*args))[1]

    with torch.no_grad():
        return [door.run(torch.compile(model, backend=backend)), bool(ran)]


def fake_tensors(model: Any, door: Door) -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        return tuple(compute(model, mode.from_tensor(door.inputs)).shape)


ACTS: dict[str, Callable[[Any, Door], Any]] = {
    "state_dict_elsewhere": lambda m, d: filled(d, m, m.state_dict()),
    "save_and_load_weights": lambda m, d: filled(d, m, torch.load(_saved(m.state_dict()), weights_only=True)),
    "distributed_state_dict": lambda m, d: filled(d, m, get_model_state_dict(m)),
    "load_state_dict": lambda m, d: m.load_state_dict(halved(m)),
    "load_by_assignment": lambda m, d: m.load_state_dict(halved(m), assign=True),
    "load_a_part": lambda m, d: load_halved(body(m).get_submodule(d.kind.inner)),
    "load_through_a_parent": lambda m, d: load_halved(nn.ModuleDict({"part": m})),
    "names_of_parameters_resolve": lambda m, d: all(m.get_parameter(n) is t for n, t in m.named_parameters()),
    "state_with_gradients": lambda m, d: sorted(parameters_of(m.state_dict(keep_vars=True))),
    "to_numpy": lambda m, d: {n: float(p.detach().numpy().sum()) for n, p in body(m).named_parameters()},
    "to_meta": lambda m, d: all(tensor.is_meta for tensor in m.to("meta").state_dict().values()),
    "initialise_one": lambda m, d: nn.init.constant_(body(m).get_parameter(f"{d.kind.head}.weight"), 0.1),
    "delete_bias": lambda m, d: head_of(m, d).register_parameter("bias", None),
    "convert_sync_batchnorm": lambda m, d: norms_in(
        nn.SyncBatchNorm.convert_sync_batchnorm(m), "SyncBatchNorm"
    ),
    "configuration_of_sizes": lambda m, d: [getattr(m.config, name) for name in SIZES],
    "generate_by_a_draft": lambda m, d: d.original.generate(d.inputs[:1], assistant_model=m, **GREEDY),
    "exact_class": lambda m, d: [type(x) is type(d.original.get_submodule(n)) for n, x in m.named_modules()],
    "zero_grad": lambda m, d: m.zero_grad(),
    "pickle_module": lambda m, d: pickle.loads(pickle.dumps(m)),
    "shallow_copy": lambda m, d: copy.copy(m),
    "deep_copy": lambda m, d: copy.deepcopy(m),
    "share_memory": lambda m, d: m.share_memory(),
    "memory_format": lambda m, d: m.to(memory_format=torch.channels_last),
    "half": lambda m, d: m.half(),
    "bfloat16": lambda m, d: m.bfloat16(),
    "double": lambda m, d: m.double(),
    "eval_mode": lambda m, d: m.eval().training,
    "requires_grad_on": lambda m, d: {p.requires_grad for p in m.requires_grad_(True).parameters()},
    "requires_grad_off": lambda m, d: {p.requires_grad for p in m.requires_grad_(False).parameters()},
    "signature": lambda m, d: list(inspect.signature(m.forward).parameters),
    "generate": lambda m, d: m.generate(d.inputs, max_new_tokens=4, do_sample=False),
    "count_parameters": lambda m, d: sum(p.numel() for p in m.parameters()),
    "memory_footprint": lambda m, d: m.get_memory_footprint(),
    "device_and_dtype": lambda m, d: [str(m.device), str(m.dtype)],
    "isinstance_of_its_class": lambda m, d: isinstance(m, type(d.original)),
    "weight_decay_names": lambda m, d: sorted(body(m).no_weight_decay()),
    "symbolic_trace": lambda m, d: torch.fx.symbolic_trace(m),
    "export": lambda m, d: torch.export.export(m, (d.inputs,)).module()(d.inputs),
}
"""Acts of one expression, by their names; the others are the functions of this module."""


def act_of(name: str) -> Callable[[Any, Door], Any]:
    """Return an act by its name."""
    return ACTS.get(name) or globals()[name]  # type: ignore[no-any-return]
