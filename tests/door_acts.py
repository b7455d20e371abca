"""Acts of others' tools on a model: an act takes a model and its `Door`, and returns what is compared.

That is a module, which is then run, or values.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from door_models import Door, body, compute
from elastic_networks import in_threads
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import update_bn
from torchvision.models.feature_extraction import create_feature_extractor

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


def load_without_tied_name(model: Any, door: Door) -> Any:
    state = {n: t * 0.5 for n, t in model.state_dict().items() if n != "lm_head.weight"}
    model.load_state_dict(state, strict=isinstance(model, Supernet))


def saved_tensor_hides_nothing(model: Any, door: Door) -> Any:
    loaded = torch.load(_saved(model.state_dict()), weights_only=True)
    return {name: t.untyped_storage().nbytes() for name, t in loaded.items()}


def safetensors_save_model(model: Any, door: Door) -> Any:
    from safetensors.torch import load_model, save_model

    save_model(model, path := door.folder() / "model.safetensors")
    load_model(other := door.blank(model), path)
    return other


def safetensors_load_model(model: Any, door: Door) -> Any:
    from safetensors.torch import load_model, save_model

    save_model(door.blank(model), path := door.folder() / "model.safetensors")
    load_model(model, path)


def save_pretrained(model: Any, door: Door) -> Any:
    folder = door.folder()
    model.save_pretrained(folder / "saved")
    return type(door.original).from_pretrained(folder / "saved").eval()


def insert_again(model: Any, door: Door) -> Any:
    import subnetact

    supernet = subnetact.insert_(model, example=door.inputs, axes=("ffn",))
    return supernet.subnet(supernet.space.smallest())


def assign_training(model: Any, door: Door) -> Any:
    """Set the mode as an attribute, as recipes for some layers do, and run."""
    for module in body(model).modules():
        module.training = True
    with torch.no_grad():
        output = door.run(model)
    for module in body(model).modules():
        module.training = False
    return output


def halve_in_place(model: Any, door: Door) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


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


def optimizer_step(model: Any, door: Door) -> Any:
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        door.run(model.train()).pow(2).mean().backward()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.eval()


def new_head(model: Any, door: Door) -> Any:
    head = nn.Linear(head_of(model, door).in_features, 3)
    nn.init.constant_(head.weight, 0.1), nn.init.constant_(head.bias, 0.2)
    _replace_head(model, door, head)
    if isinstance(model, Supernet):
        door.supernet(door.inputs, subnet=door.small)


def swap_class(model: Any, door: Door) -> Any:
    """Give a layer another class in place, as sharding and quantising do."""
    head = head_of(model, door)
    head.__class__ = type("Louder", (Louder, type(head)), {})


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
    for module in body(model).modules():
        if hasattr(module, "eps"):
            module.eps = 1.0
    if isinstance(model, Supernet):
        model.refresh()


def delete_module(model: Any, door: Door) -> Any:
    delattr(body(model), door.kind.head)
    return hasattr(body(model), door.kind.head)


def plain_attribute(model: Any, door: Door) -> Any:
    body(model).note = [1]
    return body(model).note


def set_configuration(model: Any, door: Door) -> Any:
    model.config.use_cache = False
    model.config.output_hidden_states = True
    model.generation_config.max_new_tokens = 2
    return type(model(door.inputs).hidden_states)


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


def call_by_name(model: Any, door: Door) -> Any:
    mask = torch.ones_like(door.inputs)
    output = model(input_ids=door.inputs, attention_mask=mask, output_hidden_states=True)
    return [output.logits, output.hidden_states[0], output.hidden_states[-1]]  # Skipped layers repeat others.


def distributed_data_parallel(model: Any, door: Door) -> Any:
    wrapped = nn.parallel.DistributedDataParallel(model.train())
    door.run(wrapped).pow(2).mean().backward()
    gradient = body(model).get_parameter(f"{door.kind.head}.weight").grad
    model.zero_grad()
    model.eval()
    return gradient


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


def hook_of_a_layer(model: Any, door: Door) -> Any:
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


def backward_hook(model: Any, door: Door) -> Any:
    seen: list[Any] = []
    layer = body(model).get_submodule(door.kind.linear)
    layer.register_full_backward_hook(lambda m, before, after: seen.append(after[0]))
    x = door.inputs.clone().requires_grad_()
    compute(model, x).pow(2).sum().backward()
    return seen


def compiled(model: Any, door: Door) -> Any:
    """Compile a model, and tell what it computes and whether its graphs ran."""
    ran: list[Any] = []
    torch._dynamo.reset()

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: (ran.append(1), graph(*args))[1]

    with torch.no_grad():
        return [door.run(torch.compile(model, backend=backend)), bool(ran)]


def double_with(switch: str, model: Any) -> Any:
    """Convert with a switch of torch: `swap` tensors beneath the parameters, or `overwrite` these."""
    turn = getattr(torch.__future__, f"set_{switch}_module_params_on_conversion")
    turn(True)
    try:
        model.double()
    finally:
        turn(False)


def run_without_gradients(model: Any, door: Door, *contexts: Any) -> Any:
    with torch.no_grad(), ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return door.run(model)


def with_row(model: Any, door: Door, value: Any) -> Any:
    """Return a value after the supernet, where the model is one, has run its small subnet."""
    if isinstance(model, Supernet):
        door.supernet(door.inputs, subnet=door.small)
    return value


def trainer_step(model: Any, door: Door) -> Any:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": door.inputs[0], "labels": door.inputs[0]}] * 2
    options: dict[str, Any] = {"max_steps": 1, "save_steps": 1, "use_cpu": True, "report_to": []}
    options |= {"disable_tqdm": True, "logging_strategy": "no", "max_grad_norm": 0.0}
    options |= {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(str(door.folder()), **options)
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    model.eval()


def replace_tensors(model: Any, door: Door) -> Any:
    """Put new tensors into the places of the former ones, one by one, as loaders of large models do."""
    from accelerate.utils import set_module_tensor_to_device

    for name, tensor in model.state_dict().items():
        set_module_tensor_to_device(model, name, "cpu", value=tensor * 0.5)


ACTS: dict[str, Callable[[Any, Door], Any]] = {
    "state_dict_elsewhere": lambda m, d: filled(d, m, m.state_dict()),
    "save_and_load_weights": lambda m, d: filled(d, m, torch.load(_saved(m.state_dict()), weights_only=True)),
    "distributed_state_dict": lambda m, d: filled(d, m, get_model_state_dict(m)),
    "state_with_gradients": lambda m, d: sorted(parameters_of(m.state_dict(keep_vars=True))),
    "to_numpy": lambda m, d: {n: float(p.detach().numpy().sum()) for n, p in body(m).named_parameters()},
    "to_meta": lambda m, d: all(tensor.is_meta for tensor in m.to("meta").state_dict().values()),
    "convert_sync_batchnorm": lambda m, d: norms_in(
        nn.SyncBatchNorm.convert_sync_batchnorm(m), "SyncBatchNorm"
    ),
    "configuration_of_sizes": lambda m, d: [getattr(m.config, name) for name in SIZES],
    "generate_by_a_draft": lambda m, d: d.original.generate(d.inputs[:1], assistant_model=m, **GREEDY),
    "exact_class": lambda m, d: [type(x) is type(d.original.get_submodule(n)) for n, x in m.named_modules()],
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
    "train_mode": lambda m, d: [
        run_without_gradients(m.train(), d),
        run_without_gradients(m.eval(), d),
    ],
    "autocast": lambda m, d: run_without_gradients(m, d, torch.autocast("cpu", torch.bfloat16)),
    "inference_mode": lambda m, d: run_without_gradients(m, d, torch.inference_mode()),
    "two_threads": lambda m, d: in_threads(*[lambda: [run_without_gradients(m, d) for _ in range(5)]] * 2),
    "compiled_in_place": lambda m, d: (m.compile(backend="eager"), run_without_gradients(m, d))[1],
    "reset_classifier": lambda m, d: with_row(m, d, body(m).reset_classifier(3)) or tuple(d.run(m).shape),
    "resize_token_embeddings": lambda m, d: body(m).resize_token_embeddings(47) and tuple(d.run(m).shape),
    "register_buffer": lambda m, d: (
        body(m).register_buffer("note", torch.ones(2), persistent=False) or body(m).note
    ),
    "register_parameter": lambda m, d: (
        body(m).register_parameter("note", nn.Parameter(torch.ones(2))) or body(m).note
    ),
    "tie_weights": lambda m, d: (body(m).tie_weights(), len(list(body(m).parameters())))[1],
    "set_input_gradients": lambda m, d: (body(m).enable_input_require_grads(), d.run(m).requires_grad)[1],
    "set_attention": lambda m, d: (m.set_attn_implementation("eager"), m.config._attn_implementation)[1],
    "quantize_dynamic": lambda m, d: torch.ao.quantization.quantize_dynamic(m, {nn.Linear}),
    "functional_call": lambda m, d: [torch.func.functional_call(m, halved(m), (d.inputs,), {}), d.run(m)],
    "feature_extractor": lambda m, d: create_feature_extractor(m, {"layer2": "a", "layer4": "b"})(d.inputs),
    "script_trace": lambda m, d: torch.jit.trace(m, (d.inputs,)),
    "script": lambda m, d: torch.jit.script(m),
}
"""Acts of one expression, by their names; the others are the functions of this module."""
CHANGES: dict[str, Callable[[Any, Door], Any]] = {
    "zero_grad": lambda m, d: m.zero_grad(),
    "initialise_one": lambda m, d: nn.init.constant_(body(m).get_parameter(f"{d.kind.head}.weight"), 0.1),
    "delete_bias": lambda m, d: head_of(m, d).register_parameter("bias", None),
    "double_by_swapping": lambda m, d: double_with("swap", m),
    "double_by_overwriting": lambda m, d: double_with("overwrite", m),
    "double_of_a_parent": lambda m, d: nn.ModuleDict({"part": m}).double(),
    "update_bn": lambda m, d: update_bn([d.inputs], m),
    "new_head_on_itself": lambda m, d: setattr(m, d.kind.head, nn.Identity()),
    "write_modules": lambda m, d: body(m)._modules.update({d.kind.head: nn.Identity()}),
    "prune_and_remove": lambda m, d: prune.remove(
        prune.l1_unstructured(_layer(m, d), "weight", 0.5), "weight"
    ),
    "prune_global": lambda m, d: prune.global_unstructured(
        [(_layer(m, d), "weight"), (head_of(m, d), "weight")], prune.L1Unstructured, amount=0.5
    ),
    "register_parametrization": lambda m, d: parametrize.register_parametrization(
        _layer(m, d), "weight", Doubled()
    ),
    "old_weight_norm": lambda m, d: nn.utils.weight_norm(_layer(m, d)),
    "offload": lambda m, d: importlib.import_module("accelerate").cpu_offload(m, "cpu"),
    "load_state_dict": lambda m, d: m.load_state_dict(halved(m)),
    "load_by_assignment": lambda m, d: m.load_state_dict(halved(m), assign=True),
    "load_a_part": lambda m, d: load_halved(body(m).get_submodule(d.kind.inner)),
    "load_through_a_parent": lambda m, d: load_halved(nn.ModuleDict({"part": m})),
}
"""Acts of one expression that return nothing."""


def act_of(name: str) -> Callable[[Any, Door], Any]:
    def change(model: Any, door: Door) -> None:
        CHANGES[name](model, door)

    if name in CHANGES:
        return change
    return ACTS.get(name) or globals()[name]  # type: ignore[no-any-return]
