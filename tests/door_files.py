"""Acts of others' tools that save, load, copy and send a model.

An act takes a model and its `Door`, and returns what is compared: a module, which is then run, or values.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any
from unittest import mock

import torch
from door_models import Door, body
from torch import nn

from subnetact.supernet.supernet import Supernet

Act = Any


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def state_dict_elsewhere(model: Any, door: Door) -> Any:
    other = door.blank(model)
    other.load_state_dict(model.state_dict())
    return other


def load_state_dict(model: Any, door: Door) -> Any:
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})


def load_by_assignment(model: Any, door: Door) -> Any:
    model.load_state_dict({n: t * 0.5 for n, t in model.state_dict().items()}, assign=True)


def load_named_tensors(model: Any, door: Door) -> Any:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {n: t.detach() * 0.5 for n, t in tensors.items() if "inv_freq" not in n}
    model.load_state_dict(kept, strict=False)


def load_without_tied_name(model: Any, door: Door) -> Any:
    state = {n: t * 0.5 for n, t in model.state_dict().items() if n != "lm_head.weight"}
    model.load_state_dict(state, strict=isinstance(model, Supernet))


def save_and_load_weights(model: Any, door: Door) -> Any:
    other = door.blank(model)
    other.load_state_dict(torch.load(_saved(model.state_dict()), weights_only=True))
    return other


def size_of_saved_weights(model: Any, door: Door) -> Any:
    state, size = model.state_dict(), len(_saved(model.state_dict()).getvalue())
    own = {t.untyped_storage().data_ptr(): t.nbytes for t in state.values()}
    return size < sum(own.values()) + 1024 * len(state) + 4096


def saved_tensor_hides_nothing(model: Any, door: Door) -> Any:
    loaded = torch.load(_saved(model.state_dict()), weights_only=True)
    return {name: t.untyped_storage().nbytes() for name, t in loaded.items()}


def save_whole_module(model: Any, door: Door) -> Any:
    return torch.load(_saved(model), weights_only=False)


def pickle_module(model: Any, door: Door) -> Any:
    return pickle.loads(pickle.dumps(model))


def shallow_copy(model: Any, door: Door) -> Any:
    return copy.copy(model)


def deep_copy(model: Any, door: Door) -> Any:
    return copy.deepcopy(model)


def safetensors_file(model: Any, door: Door) -> Any:
    folder = door.folder()
    from safetensors.torch import load_file, save_file

    save_file(model.state_dict(), folder / "model.safetensors")
    other = door.blank(model)
    other.load_state_dict(load_file(folder / "model.safetensors"))
    return other


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


def save_pretrained_twice(model: Any, door: Door) -> Any:
    folder = door.folder()
    model.save_pretrained(folder / "saved")
    first, again = (type(door.original).from_pretrained(folder / "saved").eval() for _ in "ab")
    return torch.equal(door.run(first), door.run(again))


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


def accelerate_save_model(model: Any, door: Door) -> Any:
    folder = door.folder()
    from accelerate import Accelerator
    from safetensors.torch import load_file

    Accelerator(cpu=True).save_model(model, str(folder / "saved"))
    other = door.blank(model)
    other.load_state_dict(load_file(folder / "saved" / "model.safetensors"), strict=False)
    return other


def distributed_state_dict(model: Any, door: Door) -> Any:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    other = door.blank(model)
    other.load_state_dict(get_model_state_dict(model))
    return other


def set_distributed_state_dict(model: Any, door: Door) -> Any:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(model, {name: tensor * 0.5 for name, tensor in model.state_dict().items()})


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


def state_of_a_parent_hides_nothing(model: Any, door: Door) -> Any:
    return saved_tensor_hides_nothing(nn.ModuleDict({"part": model}), door)


def pickle_a_parent(model: Any, door: Door) -> Any:
    return pickle.loads(pickle.dumps(nn.ModuleDict({"part": model})))["part"]


def load_a_part(model: Any, door: Door) -> Any:
    part = body(model).get_submodule(door.kind.inner)
    part.load_state_dict({name: tensor * 0.5 for name, tensor in part.state_dict().items()})


def load_through_a_parent(model: Any, door: Door) -> Any:
    parent = nn.ModuleDict({"part": model})
    parent.load_state_dict({name: tensor * 0.5 for name, tensor in parent.state_dict().items()})


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


def names_of_parameters_resolve(model: Any, door: Door) -> Any:
    return all(model.get_parameter(name) is tensor for name, tensor in model.named_parameters())


def names_of_parameters_are_of_the_state(model: Any, door: Door) -> Any:
    return {name for name, _ in model.named_parameters()} <= set(model.state_dict())


def state_with_gradients(model: Any, door: Door) -> Any:
    state = model.state_dict(keep_vars=True)
    return sorted(name for name, tensor in state.items() if isinstance(tensor, nn.Parameter))


def to_numpy(model: Any, door: Door) -> Any:
    return {name: float(p.detach().numpy().sum()) for name, p in body(model).named_parameters()}


def share_memory(model: Any, door: Door) -> Any:
    return model.share_memory()


def memory_format(model: Any, door: Door) -> Any:
    return model.to(memory_format=torch.channels_last)


def insert_again(model: Any, door: Door) -> Any:
    """Make the model elastic, once more if it was cut out of an elastic one."""
    import subnetact

    supernet = subnetact.insert_(model, example=door.inputs, axes=("ffn",))
    return supernet.subnet(supernet.space.smallest())
