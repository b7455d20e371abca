"""The table of doors: what acts of others' tools do to a supernet, a view, an extract and an engine.

Every cell is run. Whatever is done to a view or an extract, everybody else's answers stay as they were, and
cached views and engines still follow the weights. `FAILS` lists the cells that are not yet as they should be.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import door_changes as changes
import door_files as files
import door_runs as runs
import pytest
import torch
from door_models import Door, compute, equal
from torch import nn

from subnetact.errors import EngineError, SubnetActError, ViewError

pytest.importorskip("timm")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif("not hasattr(__import__('os'), 'fork')"),
]


@dataclass(frozen=True)
class Outcome:
    """What a cell of the table says.

    Attributes:
        words: what is printed for it.
        same: whether the subject may do as an ordinary module does.
        error: the error with which it may refuse instead, naming `names`.
        shared: whether the act writes the weights, of which there is one copy for all subnets.
        late: whether it is refused when the changed model runs, and not before.
        beneath: whether the act is done to the supernet of the engine.
    """

    words: str
    same: bool = True
    error: Any = None
    names: str = ""
    shared: bool = False
    late: bool = False
    beneath: bool = False


SAME = Outcome("as an ordinary module")
WRITES = Outcome("as an ordinary module, and all subnets see it", shared=True)
FOLLOWS = Outcome("follows its supernet", beneath=True)
NOT = None
"""Not meant."""


Errors = type[BaseException] | tuple[type[BaseException], ...]


def refused(error: Errors, names: str, **options: bool) -> Outcome:
    return Outcome("refused", same=False, error=error, names=names, **options)


def or_refused(error: Errors, names: str, **options: bool) -> Outcome:
    return Outcome("as an ordinary module, or refused", error=error, names=names, **options)


SHARES = refused(ViewError, "extract")
OR_SHARES = or_refused(ViewError, "extract|deepcopy")
BUNDLE = refused(EngineError, r"Engine\.load")
OF_A_SUBNET = refused(AttributeError, r"subnet\(spec\)|supernet\.network")
FOREIGN = or_refused(
    (ViewError, RuntimeError, NotImplementedError), "extract|contiguous|stride|require gradient"
)
"""Torch refuses the strides of a view, or that it is frozen."""
PARTLY = or_refused(SubnetActError, "only=|as_pretrained")
INSERT_AGAIN = or_refused(SubnetActError, r"remove\(\)|insert_|subnet\(spec\)", late=True)


@dataclass(frozen=True)
class Row:
    """One act on one kind of model.

    Attributes:
        act: what is done, and returns what is compared.
        kind: the model that it is done to.
        cells: what a supernet, a view, an extract and an engine do.
        tolerance: how far results may be apart, in half precision for example.
        after: whether the model runs after the act.
        cut: whether a small model can be cut out of an ordinary model after the act.
        needs: a library without which the row is skipped.
    """

    act: Callable[[Any, Door], Any]
    kind: str
    cells: tuple[Outcome | None, ...]
    tolerance: float = 5e-5
    after: bool = True
    cut: bool = True
    needs: str = "torch"


def row(
    act: Any, kind: str, supernet: Any, view: Any, extract: Any, engine: Any = NOT, **options: Any
) -> Row:
    return Row(act, kind, (supernet, view, extract, engine), **options)


TABLE = [
    # act, kind of model, supernet, view, extract, engine
    row(files.state_dict_elsewhere, "llama", SAME, SAME, SAME),
    row(files.state_dict_elsewhere, "resnet", SAME, SAME, SAME),
    row(files.load_state_dict, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(files.load_state_dict, "resnet", SAME, SHARES, SAME),
    row(files.load_by_assignment, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(files.load_named_tensors, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(files.load_without_tied_name, "tied", SAME, SHARES, SAME, FOLLOWS),
    row(files.save_and_load_weights, "llama", SAME, SAME, SAME),
    row(files.size_of_saved_weights, "llama", SAME, SAME, SAME),
    row(files.saved_tensor_hides_nothing, "vit", SAME, SAME, SAME),
    row(files.save_whole_module, "resnet", SAME, SHARES, SAME, BUNDLE),
    row(files.pickle_module, "llama", SAME, SHARES, SAME, BUNDLE),
    row(files.shallow_copy, "llama", refused(ViewError, "deepcopy"), SAME, SAME, BUNDLE),
    row(files.deep_copy, "llama", SAME, SAME, SAME, BUNDLE),
    row(files.deep_copy, "tied", SAME, SAME, SAME),
    row(files.safetensors_file, "llama", SAME, SAME, SAME),
    row(files.safetensors_save_model, "tied", SAME, SAME, SAME),
    row(files.safetensors_load_model, "tied", SAME, SHARES, SAME, FOLLOWS),
    row(files.save_pretrained, "llama", SAME, PARTLY, PARTLY),
    row(files.save_pretrained, "tied", SAME, PARTLY, PARTLY),
    row(files.save_pretrained_twice, "llama", SAME, PARTLY, PARTLY),
    row(files.push_to_hub, "llama", OF_A_SUBNET, PARTLY, PARTLY),
    row(files.timm_save_for_hub, "resnet", NOT, PARTLY, PARTLY),
    row(files.accelerate_save_model, "tied", SAME, SAME, SAME),
    row(files.distributed_state_dict, "llama", SAME, SAME, SAME),
    row(files.set_distributed_state_dict, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(files.distributed_checkpoint, "llama", SAME, SAME, SAME),
    row(files.state_of_a_parent, "llama", SAME, SAME, SAME),
    row(files.load_through_a_parent, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(files.names_of_state_resolve, "llama", SAME, SAME, SAME),
    row(files.names_of_state_resolve, "vit", SAME, SAME, SAME),
    row(files.names_of_parameters_resolve, "llama", SAME, SAME, SAME),
    row(files.names_of_parameters_are_of_the_state, "llama", SAME, SAME, SAME),
    row(files.state_with_gradients, "llama", SAME, SAME, SAME),
    row(files.to_numpy, "llama", SAME, SAME, SAME),
    row(files.share_memory, "llama", SAME, SAME, SAME, FOLLOWS),
    row(files.memory_format, "resnet", SAME, SHARES, SAME, FOLLOWS),
    row(files.insert_again, "llama", NOT, NOT, SAME, after=False),
    # dtypes, devices and modes
    row(changes.half, "llama", SAME, SHARES, SAME, FOLLOWS, tolerance=0.02),
    row(changes.half, "resnet", SAME, SHARES, SAME, FOLLOWS, tolerance=0.02),
    row(changes.bfloat16, "llama", SAME, SHARES, SAME, FOLLOWS, tolerance=0.1),
    row(changes.bfloat16, "vit", SAME, SHARES, SAME, FOLLOWS, tolerance=0.1),
    row(changes.double, "resnet", SAME, SHARES, SAME, FOLLOWS),
    row(changes.to_dtype, "vit", SAME, SHARES, SAME, FOLLOWS),
    row(changes.double_by_swapping, "llama", or_refused(RuntimeError, "swap"), SHARES, SAME),
    row(changes.double_by_overwriting, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(changes.double_a_copy, "resnet", SAME, OR_SHARES, SAME),
    row(changes.to_same_dtype, "llama", SAME, SAME, SAME, FOLLOWS),
    row(changes.to_meta, "llama", SAME, SHARES, SAME, after=False),
    row(changes.to_empty, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(changes.double_of_a_parent, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(changes.train_mode, "resnet", SAME, SHARES, SAME),
    row(changes.assign_training, "resnet", NOT, OR_SHARES, SAME),
    row(changes.eval_mode, "llama", SAME, SAME, SAME, FOLLOWS),
    row(changes.requires_grad_on, "llama", SAME, SHARES, SAME),
    row(changes.requires_grad_off, "llama", SAME, SAME, SAME, FOLLOWS),
    row(changes.requires_grad_of_parameters, "llama", SAME, OR_SHARES, SAME),
    row(changes.zero_grad, "llama", SAME, SAME, SAME, FOLLOWS),
    # values
    row(changes.halve_in_place, "llama", SAME, WRITES, SAME, FOLLOWS),
    row(changes.halve_in_place, "resnet", SAME, WRITES, SAME, FOLLOWS),
    row(changes.initialise_one, "llama", SAME, WRITES, SAME, FOLLOWS),
    row(changes.apply_by_weight, "llama", SAME, WRITES, SAME, FOLLOWS),
    row(changes.reset_parameters, "resnet", NOT, OR_SHARES, SAME),
    row(changes.assign_data, "llama", SAME, NOT, SAME, FOLLOWS),
    row(changes.write_by_numpy, "llama", SAME, WRITES, SAME, FOLLOWS),
    row(changes.vector_to_parameters, "llama", SAME, NOT, SAME, FOLLOWS),
    row(changes.clip_gradients, "llama", SAME, SHARES, SAME),
    row(changes.optimizer_step, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(changes.optimizer_step, "tied", SAME, SHARES, SAME, FOLLOWS),
    row(changes.optimizer_step, "vit", SAME, SHARES, SAME, FOLLOWS),
    row(changes.freeze_and_train, "vit", SAME, SHARES, SAME, FOLLOWS),
    row(changes.gradient_hooks, "llama", SAME, FOREIGN, SAME, FOLLOWS),
    row(changes.replace_tensors, "llama", SAME, OR_SHARES, SAME, FOLLOWS),
    row(changes.trainer_step, "llama", SAME, SHARES, SAME),
    row(changes.trainer_step, "tied", SAME, SHARES, SAME),
    row(changes.averaged_model, "llama", SAME, SAME, SAME),
    row(changes.timm_average, "resnet", SAME, SAME, SAME),
    row(changes.update_bn, "resnet", or_refused(SubnetActError, "calibrate"), SHARES, SAME),
    # modules
    row(changes.new_head, "resnet", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row(changes.new_head, "vit", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row(
        changes.new_head_on_itself,
        "resnet",
        or_refused(SubnetActError, "network"),
        OR_SHARES,
        SAME,
        cut=False,
    ),
    row(changes.identity_head, "resnet", SAME, OR_SHARES, SAME),
    row(changes.scaled_layer, "resnet", SAME, OR_SHARES, SAME, cut=False),
    row(changes.set_submodule, "resnet", SAME, OR_SHARES, SAME, cut=False),
    row(changes.write_modules, "resnet", SAME, OR_SHARES, SAME, cut=False),
    row(changes.swap_class, "llama", NOT, OR_SHARES, SAME),
    row(changes.delete_module, "llama", SAME, OR_SHARES, SAME, after=False),
    row(changes.delete_bias, "resnet", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row(changes.reset_classifier, "resnet", INSERT_AGAIN, OR_SHARES, SAME, after=False),
    row(changes.reset_classifier, "vit", INSERT_AGAIN, OR_SHARES, SAME, after=False),
    row(changes.register_buffer, "llama", SAME, OR_SHARES, SAME, FOLLOWS),
    row(changes.register_parameter, "llama", SAME, OR_SHARES, SAME, FOLLOWS),
    row(changes.assign_parameter, "vit", SAME, OR_SHARES, SAME, FOLLOWS),
    row(changes.assign_weight, "llama", SAME, OR_SHARES, SAME, FOLLOWS),
    row(changes.assign_weight, "vit", SAME, OR_SHARES, SAME, FOLLOWS),
    row(changes.write_registry, "llama", NOT, OR_SHARES, SAME),
    row(changes.add_module, "llama", SAME, OR_SHARES, SAME, FOLLOWS),
    row(changes.wrap_forward, "llama", INSERT_AGAIN, OR_SHARES, SAME),
    row(changes.resize_token_embeddings, "llama", INSERT_AGAIN, OR_SHARES, SAME, FOLLOWS),
    row(changes.resize_token_embeddings, "tied", INSERT_AGAIN, OR_SHARES, SAME, FOLLOWS),
    row(changes.set_input_embeddings, "llama", INSERT_AGAIN, OR_SHARES, SAME, FOLLOWS),
    row(changes.exchange_tensors, "vit", or_refused(RuntimeError, "swap"), OR_SHARES, SAME),
    row(changes.remove_last_layer, "llama", NOT, NOT, SAME),
    row(changes.set_input_size, "vit", NOT, OR_SHARES, SAME, after=False),
    row(changes.tie_weights, "tied", SAME, OR_SHARES, SAME, FOLLOWS),
    row(changes.prune_one, "llama", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row(changes.prune_and_remove, "llama", SAME, OR_SHARES, SAME, FOLLOWS),
    row(changes.prune_global, "resnet", INSERT_AGAIN, FOREIGN, SAME, cut=False),
    row(changes.register_parametrization, "llama", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row(changes.weight_norm, "llama", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row(changes.old_weight_norm, "llama", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row(changes.spectral_norm, "resnet", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row(changes.old_spectral_norm, "resnet", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row(changes.quantize_dynamic, "llama", NOT, NOT, SAME),
    row(changes.quantize_by_torchao, "llama", NOT, OR_SHARES, SAME, needs="torchao"),
    row(changes.convert_sync_batchnorm, "resnet", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row(changes.freeze_batch_norm, "resnet", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row(changes.fuse_conv_bn, "resnet", NOT, OR_SHARES, SAME, cut=False),
    row(changes.offload, "llama", NOT, OR_SHARES, SAME, needs="accelerate"),
    row(changes.low_rank_adapters, "llama", NOT, OR_SHARES, SAME, needs="peft"),
    row(changes.fully_shard, "llama", or_refused(SubnetActError, "shard"), FOREIGN, SAME, after=False),
    # settings
    row(changes.change_epsilon, "vit", SAME, OR_SHARES, SAME),
    row(changes.change_setting, "llama", SAME, OR_SHARES, SAME),
    row(changes.set_attention, "llama", NOT, OR_SHARES, SAME),
    row(changes.set_configuration, "llama", NOT, SAME, SAME),
    row(changes.set_feature_info, "resnet", NOT, SAME, SAME),
    row(changes.set_checkpointing, "llama", SAME, NOT, SAME, FOLLOWS),
    row(changes.set_checkpointing, "vit", SAME, NOT, SAME, FOLLOWS),
    row(changes.set_input_gradients, "llama", NOT, OR_SHARES, SAME),
    row(changes.plain_attribute, "llama", SAME, SAME, SAME, FOLLOWS),
    # calls
    row(runs.call_by_name, "llama", SAME, SAME, SAME),
    row(runs.call_with_labels, "llama", SAME, SAME, SAME),
    row(runs.signature, "llama", NOT, SAME, SAME),
    row(runs.autocast, "llama", SAME, SAME, SAME, SAME, tolerance=0.1),
    row(runs.autocast, "resnet", SAME, SAME, SAME, SAME, tolerance=0.1),
    row(runs.inference_mode, "resnet", SAME, SAME, SAME, SAME),
    row(runs.forward_in_a_child, "llama", SAME, SAME, SAME, SAME),
    row(runs.two_threads, "vit", SAME, SAME, SAME, SAME),
    row(runs.same_dropout, "llama", SAME, NOT, SAME),
    row(runs.input_gradient, "vit", SAME, SAME, SAME),
    row(runs.torch_checkpoint, "resnet", SAME, SAME, SAME),
    row(runs.inside_a_sequence, "resnet", SAME, SAME, SAME),
    row(runs.data_parallel, "vit", SAME, SAME, SAME),
    row(runs.distributed_data_parallel, "llama", SAME, SHARES, SAME),
    row(runs.accelerate_prepare, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(runs.prepare_at_lower_precision, "llama", SAME, OR_SHARES, SAME, tolerance=0.1),
    row(runs.generate, "llama", OF_A_SUBNET, SAME, SAME),
    row(runs.generate_by_a_draft, "llama", OF_A_SUBNET, SAME, SAME),
    row(runs.pipeline, "llama", OF_A_SUBNET, SAME, SAME),
    row(runs.functional_call, "resnet", SAME, SAME, SAME),
    row(runs.functional_call, "vit", SAME, SAME, SAME),
    row(runs.functional_call_meanwhile, "llama", NOT, OR_SHARES, SAME),
    row(runs.functional_gradient, "llama", SAME, SAME, SAME),
    row(runs.ensemble, "vit", SAME, SAME, SAME),
    # what a model says of itself
    row(runs.representation, "llama", NOT, SAME, SAME),
    row(runs.count_modules, "vit", NOT, SAME, SAME),
    row(runs.count_parameters, "llama", SAME, SAME, SAME),
    row(runs.num_parameters, "llama", SAME, SAME, SAME),
    row(runs.memory_footprint, "llama", OF_A_SUBNET, SAME, SAME),
    row(runs.device_and_dtype, "llama", SAME, SAME, SAME),
    row(runs.isinstance_of_its_class, "vit", NOT, SAME, SAME),
    row(runs.exact_class, "vit", NOT, NOT, SAME),
    row(runs.number_of_features, "resnet", NOT, SAME, SAME),
    row(runs.number_of_features, "vit", NOT, SAME, SAME),
    row(runs.feature_information, "resnet", NOT, SAME, SAME),
    row(runs.configuration_of_sizes, "llama", SAME, SAME, SAME),
    row(runs.weight_decay_names, "vit", SAME, SAME, SAME),
    row(runs.decay_groups, "vit", SAME, NOT, SAME),
    row(runs.layer_features, "vit", SAME, SAME, SAME),
    row(runs.count_flops, "vit", SAME, SAME, SAME),
    row(runs.profiler, "vit", SAME, SAME, SAME, SAME),
    # hooks
    row(runs.forward_hook, "llama", SAME, SAME, SAME),
    row(runs.hook_of_a_layer, "llama", or_refused(SubnetActError, "view|subnet"), SAME, SAME),
    row(runs.hook_of_a_layer, "resnet", or_refused(SubnetActError, "view|subnet"), SAME, SAME),
    row(runs.hook_of_the_root, "vit", SAME, SAME, SAME),
    row(runs.changing_hook, "resnet", SAME, OR_SHARES, SAME, cut=False),
    row(runs.backward_hook, "resnet", or_refused(SubnetActError, "view|subnet"), SAME, SAME),
    row(runs.global_hook, "resnet", SAME, SAME, SAME),
    # graphs and exports
    row(runs.symbolic_trace, "resnet", or_refused(SubnetActError, "SubnetSpec"), SAME, SAME),
    row(runs.fused_graph, "resnet", NOT, SAME, SAME),
    row(runs.feature_extractor, "resnet", NOT, OR_SHARES, SAME),
    row(runs.script_trace, "resnet", NOT, SAME, SAME),
    row(runs.script, "resnet", NOT, NOT, SAME),
    row(runs.export, "vit", NOT, SAME, SAME),
    row(runs.onnx, "resnet", NOT, SAME, NOT, needs="onnxscript"),
    row(runs.compiled_in_place, "vit", SAME, SAME, SAME),
    row(runs.compiled, "vit", SAME, SAME, SAME),
    row(runs.fake_tensors, "vit", SAME, SAME, SAME),
]

COLUMNS = ("supernet", "view", "extract", "engine")

FAILS = {
    "a checkpoint without the second name of a tied tensor is not loaded": """
        load_without_tied_name-tied-supernet load_without_tied_name-tied-engine
    """,
    "a view's state_dict has slices of the storage of everything": """
        saved_tensor_hides_nothing-vit-view safetensors_file-llama-view safetensors_save_model-tied-view
        safetensors_load_model-tied-view
    """,
    "a subnet writes a folder that does not open": """
        save_pretrained-llama-view save_pretrained-llama-extract save_pretrained-tied-view
        save_pretrained-tied-extract save_pretrained_twice-llama-view save_pretrained_twice-llama-extract
        push_to_hub-llama-view push_to_hub-llama-extract timm_save_for_hub-resnet-view
        timm_save_for_hub-resnet-extract
    """,
    "names of the state_dict do not resolve on a supernet": """
        distributed_state_dict-llama-supernet names_of_state_resolve-llama-supernet
        names_of_state_resolve-vit-supernet names_of_parameters_are_of_the_state-llama-supernet
        replace_tensors-llama-supernet replace_tensors-llama-engine functional_call-resnet-supernet
        functional_call-vit-supernet functional_gradient-llama-supernet ensemble-vit-supernet
    """,
    "a reset of a view's norms writes the statistics of all subnets": """
        update_bn-resnet-supernet
    """,
    "storage that was exchanged is not noticed": """
        assign_data-llama-supernet assign_data-llama-engine vector_to_parameters-llama-supernet
        vector_to_parameters-llama-engine resize_token_embeddings-tied-supernet
        resize_token_embeddings-tied-engine
    """,
    "a supernet does not train under Trainer": """
        trainer_step-llama-supernet trainer_step-tied-supernet
    """,
    "settings are shared with the supernet": """
        trainer_step-llama-view trainer_step-llama-extract trainer_step-tied-view trainer_step-tied-extract
        resize_token_embeddings-llama-extract resize_token_embeddings-tied-extract set_attention-llama-view
        set_attention-llama-extract set_configuration-llama-view set_configuration-llama-extract
        set_feature_info-resnet-view set_feature_info-resnet-extract remove_last_layer-llama-extract
    """,
    "an operator does not read through to its template": """
        new_head-resnet-supernet new_head-vit-supernet new_head_on_itself-resnet-supernet
        reset_classifier-vit-supernet set_checkpointing-vit-supernet set_checkpointing-vit-engine
        weight_decay_names-vit-supernet layer_features-vit-supernet change_epsilon-vit-supernet
    """,
    "a subnet does not say its sizes": """
        reset_classifier-resnet-extract reset_classifier-vit-extract number_of_features-resnet-view
        number_of_features-resnet-extract number_of_features-vit-view number_of_features-vit-extract
        configuration_of_sizes-llama-view configuration_of_sizes-llama-extract
    """,
    "a BatchNorm of a supernet is found by its class, and lacks what one has": """
        convert_sync_batchnorm-resnet-supernet freeze_batch_norm-resnet-supernet
    """,
    "a changed elastic layer is not refused in words that help": """
        reset_classifier-resnet-supernet prune_one-llama-supernet prune_and_remove-llama-supernet
        prune_and_remove-llama-engine prune_global-resnet-supernet register_parametrization-llama-supernet
        weight_norm-llama-supernet spectral_norm-resnet-supernet
    """,
    "a module that is assigned to a supernet itself is not used": """
        set_submodule-resnet-supernet
    """,
    "an extract has hooks, with which it is not made elastic again": """
        insert_again-llama-extract
    """,
    "a view whose layers are set to training writes the statistics of all subnets": """
        assign_training-resnet-view
    """,
    "registries of parameters are shared, and written past the methods of a module": """
        replace_tensors-llama-view old_weight_norm-llama-view offload-llama-view
        functional_call_meanwhile-llama-view
    """,
    "a hook that is put on the network after a view was bound does not run in it": """
        forward_hook-llama-supernet changing_hook-resnet-supernet
    """,
    "sharded layers are not refused": """
        fully_shard-llama-supernet fully_shard-llama-view
    """,
    "a view that its holder changes stays everybody's": """
        new_head-resnet-view new_head-vit-view new_head_on_itself-resnet-view identity_head-resnet-view
        scaled_layer-resnet-view set_submodule-resnet-view write_modules-resnet-view swap_class-llama-view
        delete_module-llama-view delete_bias-resnet-view reset_classifier-resnet-view
        reset_classifier-vit-view assign_parameter-vit-view assign_weight-llama-view assign_weight-vit-view
        write_registry-llama-view wrap_forward-llama-view resize_token_embeddings-llama-view
        resize_token_embeddings-tied-view set_input_embeddings-llama-view prune_one-llama-view
        prune_and_remove-llama-view register_parametrization-llama-view weight_norm-llama-view
        freeze_batch_norm-resnet-view change_setting-llama-view prepare_at_lower_precision-llama-view
        changing_hook-resnet-view quantize_by_torchao-llama-view low_rank_adapters-llama-view
        exchange_tensors-vit-view set_input_size-vit-view change_epsilon-vit-view
    """,
}


def cells() -> Iterator[Any]:
    """Yield every cell that is meant, with its name."""
    reasons = {name: reason for reason, names in FAILS.items() for name in names.split()}
    for each in TABLE:
        for column, outcome in zip(COLUMNS, each.cells, strict=True):
            if outcome is not None:
                name = f"{each.act.__name__}-{each.kind}-{column}"
                marks = [pytest.mark.xfail(strict=True, reason=reasons[name])] if name in reasons else []
                yield pytest.param(each, column, outcome, id=name, marks=marks)


def value(result: Any, door: Door) -> Any:
    """Return what is compared of the result of an act: the output of a module, or the result."""
    if not isinstance(result, nn.Module):
        return result
    with torch.no_grad():
        return door.run(result)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one.keys() | other.keys() if not equal(one.get(name), other.get(name))]


def require_unharmed(door: Door, before: dict[str, Any] | None) -> None:
    """Require that others' answers are as `before`, and that cached views still follow the weights."""
    if before is not None:
        changed = differences(before, door.answers())
        assert not changed, "others are changed"
    with torch.no_grad():
        for parameter in door.supernet.parameters():
            parameter.mul_(0.9)
    cached, served = door.outputs(), door.served()
    door.supernet.refresh()
    parted = differences(cached, fresh := door.outputs())
    assert not parted, "cached views do not follow the weights"
    assert equal(served, [fresh[str(door.small)], fresh[str(door.large)]]), "the engine does not follow"


def require_same(each: Row, column: str, outcome: Outcome, door: Door) -> None:
    """Do the act to the subject and to an ordinary module, and require the same of both."""
    beneath = column == "supernet" or outcome.beneath
    ordinary = door.ordinary("supernet" if beneath else column)
    torch.manual_seed(0)
    expected = value(each.act(ordinary, door), door)
    subject = door.subject(column)
    if outcome.beneath:
        door.served()
    torch.manual_seed(0)
    result = value(each.act(door.supernet if outcome.beneath else subject, door), door)
    assert outcome.beneath or equal(result, expected, each.tolerance), "the act gives something else"
    if not each.after:
        return
    with torch.no_grad():
        large, small = door.run(ordinary), None
        if beneath and each.cut:
            small = door.run(door.cut(ordinary))
        if outcome.beneath:
            assert equal(compute(door.engine, door.inputs_of(door.supernet), subnet=1), large, each.tolerance)
            own: Any = compute(door.engine, door.inputs_of(door.supernet), subnet=0)
        else:
            assert equal(door.run(subject), large, each.tolerance), "the model computes something else"
            own = compute(door.supernet, door.inputs, subnet=door.small)
        if small is not None:
            assert equal(own, small, each.tolerance), "the small subnet computes something else"
        if outcome.shared:
            assert equal(own, large, each.tolerance), (
                "the supernet does not see the weights that were written"
            )


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """Let this process be a group of its own."""
    import torch.distributed as distributed

    address = f"file://{folder / 'group'}"
    distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(("each", "column", "outcome"), list(cells()))
def test_door(each: Row, column: str, outcome: Outcome, tmp_path: Path) -> None:
    importable(each.needs)
    door = Door(each.kind, tmp_path)
    others = column in ("view", "extract") and not outcome.shared
    before = door.answers() if others or (outcome.error and not outcome.late) else None
    alone = nullcontext()
    if each.act in (changes.fully_shard, runs.distributed_data_parallel):
        alone = process_group(tmp_path)
    with alone:
        try:
            require_same(each, column, outcome, door)
            refusal = None
        except BaseException as error:
            if outcome.error is None or not isinstance(error, outcome.error):
                raise
            refusal = error
    assert refusal is not None or outcome.same, "the act is not refused"
    if refusal is not None:
        assert re.search(outcome.names, str(refusal)), str(refusal)
        changed = [] if before is None else differences(before, door.answers())
        assert not changed, "what is refused has changed something"
    if others:
        require_unharmed(door, before)


def importable(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError:
        pytest.skip(f"{name} is not installed")
