"""Acts of others' tools that run, look at, trace or export a model."""

from __future__ import annotations

import inspect
import os
import threading
import warnings
from collections import Counter
from typing import Any

import torch
from door_models import Door, body, compute
from torch import nn

# -- calls --


def call_by_name(model: Any, door: Door) -> Any:
    mask = torch.ones_like(door.inputs)
    output = model(input_ids=door.inputs, attention_mask=mask, output_hidden_states=True)
    return [output.logits, output.hidden_states[0], output.hidden_states[-1]]  # Skipped layers repeat others.


def call_with_labels(model: Any, door: Door) -> Any:
    return [model(door.inputs, labels=door.inputs).loss, model(door.inputs, return_dict=False)[0]]


def signature(model: Any, door: Door) -> Any:
    return list(inspect.signature(model.forward).parameters)


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


def inside_a_sequence(model: Any, door: Door) -> Any:
    return nn.Sequential(model, nn.Softmax(-1))(door.inputs)


def data_parallel(model: Any, door: Door) -> Any:
    return door.run(nn.DataParallel(model))


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


def generate(model: Any, door: Door) -> Any:
    return model.generate(door.inputs, max_new_tokens=4, do_sample=False)


def generate_by_a_draft(model: Any, door: Door) -> Any:
    large = door.original
    return large.generate(door.inputs[:1], max_new_tokens=4, do_sample=False, assistant_model=model)


def pipeline(model: Any, door: Door) -> Any:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")
    run = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    return run("w3 w4 w5", max_new_tokens=4, do_sample=False)[0]["generated_text"]


# -- functional calls --


def functional_call(model: Any, door: Door) -> Any:
    halved = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
    return [torch.func.functional_call(model, halved, (door.inputs,), {}), door.run(model)]


def functional_call_meanwhile(model: Any, door: Door) -> Any:
    """Run another subnet while a functional call is on its way, as another thread may."""
    seen: list[bool] = []
    before = compute(door.supernet, door.inputs, subnet=door.middle)

    def look(*_: Any) -> None:
        seen.append(torch.equal(compute(door.supernet, door.inputs, subnet=door.middle), before))

    handle = model.register_forward_pre_hook(look)
    halved = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        torch.func.functional_call(model, halved, (door.inputs,))
    handle.remove()
    return seen


def functional_gradient(model: Any, door: Door) -> Any:
    name = f"{door.kind.head}.weight"
    weight = model.state_dict()[name]

    def loss(weight: Any) -> Any:
        output = torch.func.functional_call(model, {name: weight}, (door.inputs,))
        return getattr(output, "logits", output).pow(2).mean()

    return torch.func.grad(loss)(weight.clone())


def ensemble(model: Any, door: Door) -> Any:
    """Run two models at once by vmap over functional calls."""
    name = f"{door.kind.head}.weight"
    weight = model.state_dict()[name]

    def run(weight: Any) -> Any:
        output = torch.func.functional_call(model, {name: weight}, (door.inputs,))
        return getattr(output, "logits", output)

    with torch.no_grad():
        return torch.vmap(run)(torch.stack([weight, weight * 0.5]))


# -- what a model says of itself --


def representation(model: Any, door: Door) -> Any:
    return [type(model).__name__ in repr(model), repr(body(model).get_submodule(door.kind.head))]


def count_modules(model: Any, door: Door) -> Any:
    return Counter(type(module).__name__ for module in model.modules())


def count_parameters(model: Any, door: Door) -> Any:
    return sum(p.numel() for p in model.parameters())


def num_parameters(model: Any, door: Door) -> Any:
    return body(model).num_parameters()


def memory_footprint(model: Any, door: Door) -> Any:
    return model.get_memory_footprint()


def device_and_dtype(model: Any, door: Door) -> Any:
    return [str(model.device), str(model.dtype)]


def isinstance_of_its_class(model: Any, door: Door) -> Any:
    return isinstance(model, type(door.original))


def exact_class(model: Any, door: Door) -> Any:
    return [type(module) is type(door.original.get_submodule(name)) for name, module in model.named_modules()]


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


def configuration_of_sizes(model: Any, door: Door) -> Any:
    config = model.config
    return [
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
    ]


def weight_decay_names(model: Any, door: Door) -> Any:
    return sorted(body(model).no_weight_decay())


def decay_groups(model: Any, door: Door) -> Any:
    from timm.optim import param_groups_weight_decay

    groups = param_groups_weight_decay(body(model), 0.1)
    return [(group["weight_decay"], len(group["params"])) for group in groups]


def layer_features(model: Any, door: Door) -> Any:
    with torch.no_grad():
        return body(model).get_classifier().weight.shape[0]


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


# -- hooks --


def forward_hook(model: Any, door: Door) -> Any:
    seen: list[Any] = []
    layer = body(model).get_submodule(door.kind.inner)
    handle = layer.register_forward_hook(lambda m, x, y: seen.append(1))
    door.run(model)
    handle.remove()
    door.run(model)
    return seen


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


# -- graphs and exports --


def symbolic_trace(model: Any, door: Door) -> Any:
    return torch.fx.symbolic_trace(model)


def operations_trace(model: Any, door: Door) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return make_fx(model)(door.inputs)(door.inputs)


def fused_graph(model: Any, door: Door) -> Any:
    from torch.fx.experimental.optimization import fuse

    return fuse(model)


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


def export(model: Any, door: Door) -> Any:
    return torch.export.export(model, (door.inputs,)).module()(door.inputs)


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
