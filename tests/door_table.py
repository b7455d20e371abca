"""The table of doors: what a supernet, a view, an extract and an engine do under acts of others' tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import door_changes as changes
import door_files as files
import door_runs as runs
import door_values as values
from door_models import Door

from subnetact.errors import EngineError, InsertError, SubnetActError, TrainingError, ViewError

__all__ = ["COLUMNS", "TABLE", "Outcome", "Row"]


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
OR_OF_A_SUBNET = or_refused((AttributeError, SubnetActError), r"subnet\(spec\)|supernet\.network")
FOREIGN = or_refused(
    (ViewError, RuntimeError, NotImplementedError), "extract|contiguous|stride|require gradient"
)
"""Torch refuses the strides of a view, or that it is frozen."""
PARTLY = or_refused(SubnetActError, "only=|as_pretrained")
UNSWAPPED = or_refused(RuntimeError, "swap")
SIZES_DIFFER = refused(RuntimeError, "size mismatch")
NEEDS_SANDWICH = refused(TrainingError, r"SandwichTraining.*supernet\.network")
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
    row(files.push_to_hub, "llama", SAME, PARTLY, PARTLY),
    row(files.timm_save_for_hub, "resnet", NOT, SIZES_DIFFER, SIZES_DIFFER),
    row(files.accelerate_save_model, "tied", SAME, SAME, SAME, needs="accelerate"),
    row(files.distributed_state_dict, "llama", SAME, SAME, SAME),
    row(files.set_distributed_state_dict, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(files.distributed_checkpoint, "llama", SAME, SAME, SAME),
    row(files.state_of_a_parent, "llama", SAME, SAME, SAME),
    row(files.state_of_a_parent_hides_nothing, "vit", SAME, SAME, SAME),
    row(files.pickle_a_parent, "llama", SAME, SHARES, SAME),
    row(files.load_a_part, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(files.load_through_a_parent, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(files.names_of_state_resolve, "llama", SAME, SAME, SAME),
    row(files.names_of_state_resolve, "vit", SAME, SAME, SAME),
    row(files.names_of_parameters_resolve, "llama", SAME, SAME, SAME),
    row(files.names_of_parameters_are_of_the_state, "llama", SAME, SAME, SAME),
    row(files.state_with_gradients, "llama", SAME, SAME, SAME),
    row(files.to_numpy, "llama", SAME, SAME, SAME),
    row(files.share_memory, "llama", SAME, SAME, SAME, FOLLOWS),
    row(files.memory_format, "resnet", SAME, SHARES, SAME, FOLLOWS),
    row(files.insert_again, "llama", NOT, NOT, refused(InsertError, "as_pretrained"), after=False),
    # dtypes, devices and modes
    row(values.half, "llama", SAME, SHARES, SAME, FOLLOWS, tolerance=0.02),
    row(values.half, "resnet", SAME, SHARES, SAME, FOLLOWS, tolerance=0.02),
    row(values.bfloat16, "llama", SAME, SHARES, SAME, FOLLOWS, tolerance=0.1),
    row(values.bfloat16, "vit", SAME, SHARES, SAME, FOLLOWS, tolerance=0.1),
    row(values.double, "resnet", SAME, SHARES, SAME, FOLLOWS),
    row(values.to_dtype, "vit", SAME, SHARES, SAME, FOLLOWS),
    row(values.double_by_swapping, "llama", or_refused(RuntimeError, "swap"), SHARES, SAME),
    row(values.double_by_overwriting, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(values.double_a_copy, "resnet", SAME, OR_SHARES, SAME),
    row(values.to_same_dtype, "llama", SAME, SAME, SAME, FOLLOWS),
    row(values.to_meta, "llama", SAME, SHARES, SAME, after=False),
    row(values.to_empty, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(values.double_of_a_parent, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(values.train_mode, "resnet", SAME, SHARES, SAME),
    row(values.assign_training, "resnet", NOT, OR_SHARES, SAME),
    row(values.eval_mode, "llama", SAME, SAME, SAME, FOLLOWS),
    row(values.requires_grad_on, "llama", SAME, SHARES, SAME),
    row(values.requires_grad_off, "llama", SAME, SAME, SAME, FOLLOWS),
    row(values.requires_grad_of_parameters, "llama", SAME, OR_SHARES, SAME),
    row(values.zero_grad, "llama", SAME, SAME, SAME, FOLLOWS),
    # values
    row(values.halve_in_place, "llama", SAME, WRITES, SAME, FOLLOWS),
    row(values.halve_in_place, "resnet", SAME, WRITES, SAME, FOLLOWS),
    row(values.initialise_one, "llama", SAME, WRITES, SAME, FOLLOWS),
    row(values.apply_by_weight, "llama", SAME, WRITES, SAME, FOLLOWS),
    row(values.initialise_by_class, "resnet", SAME, WRITES, SAME, FOLLOWS),
    row(values.reset_parameters, "resnet", NOT, OR_SHARES, SAME),
    row(values.assign_data, "llama", SAME, NOT, SAME, FOLLOWS),
    row(values.write_by_numpy, "llama", SAME, WRITES, SAME, FOLLOWS),
    row(values.vector_to_parameters, "llama", SAME, NOT, SAME, FOLLOWS),
    row(values.clip_gradients, "llama", SAME, SHARES, SAME),
    row(values.optimizer_step, "llama", SAME, SHARES, SAME, FOLLOWS),
    row(values.optimizer_step, "tied", SAME, SHARES, SAME, FOLLOWS),
    row(values.optimizer_step, "vit", SAME, SHARES, SAME, FOLLOWS),
    row(values.freeze_and_train, "vit", SAME, SHARES, SAME, FOLLOWS),
    row(values.gradient_hooks, "llama", SAME, FOREIGN, SAME, FOLLOWS),
    row(values.replace_tensors, "llama", SAME, OR_SHARES, SAME, FOLLOWS, needs="accelerate"),
    row(values.trainer_step, "llama", NEEDS_SANDWICH, SHARES, SAME, needs="accelerate"),
    row(values.trainer_step, "tied", NEEDS_SANDWICH, SHARES, SAME, needs="accelerate"),
    row(values.averaged_model, "llama", SAME, SAME, SAME),
    row(values.timm_average, "resnet", SAME, SAME, SAME),
    row(values.update_bn, "resnet", or_refused(SubnetActError, "calibrate"), SHARES, SAME),
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
    row(changes.exchange_tensors, "vit", UNSWAPPED, UNSWAPPED, SAME),
    row(changes.remove_last_layer, "llama", NOT, NOT, SAME),
    row(changes.set_input_size, "vit", NOT, OR_SHARES, SAME, after=False),
    row(changes.tie_weights, "tied", SAME, OR_SHARES, SAME, FOLLOWS),
    row(changes.prune_one, "llama", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row(changes.prune_and_remove, "llama", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
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
    row(changes.low_rank_adapters, "llama", SAME, OR_SHARES, SAME, FOLLOWS, cut=False, needs="peft"),
    row(changes.fully_shard, "llama", SAME, FOREIGN, SAME, after=False),
    # settings
    row(changes.change_epsilon, "vit", SAME, OR_SHARES, SAME),
    row(changes.change_setting, "llama", SAME, OR_SHARES, SAME),
    row(changes.set_attention, "llama", NOT, OR_SHARES, SAME),
    row(changes.set_configuration, "llama", NOT, SAME, SAME),
    row(changes.set_feature_info, "resnet", NOT, SAME, SAME),
    row(changes.wrap_for_checkpointing, "llama", SAME, OR_SHARES, SAME, cut=False),
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
    row(runs.accelerate_prepare, "llama", SAME, SHARES, SAME, FOLLOWS, needs="accelerate"),
    row(runs.prepare_at_lower_precision, "llama", SAME, OR_SHARES, SAME, tolerance=0.1, needs="accelerate"),
    row(runs.generate, "llama", SAME, SAME, SAME),
    row(runs.generate_by_a_draft, "llama", SAME, SAME, SAME),
    row(runs.pipeline, "llama", SAME, SAME, SAME),
    row(runs.functional_call, "resnet", NOT, SAME, SAME),  # statistics of a supernet are those of the row
    row(runs.functional_call, "vit", SAME, SAME, SAME),
    row(runs.functional_call_meanwhile, "llama", NOT, OR_SHARES, SAME),
    row(runs.functional_gradient, "llama", SAME, SAME, SAME),
    row(runs.ensemble, "vit", SAME, SAME, SAME),
    # what a model says of itself
    row(runs.representation, "llama", NOT, SAME, SAME),
    row(runs.count_modules, "vit", NOT, SAME, SAME),
    row(runs.count_parameters, "llama", SAME, SAME, SAME),
    row(runs.num_parameters, "llama", SAME, SAME, SAME),
    row(runs.memory_footprint, "llama", OR_OF_A_SUBNET, SAME, SAME),
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
    row(runs.hook_of_a_layer, "llama", SAME, SAME, SAME),
    row(runs.hook_of_a_layer, "resnet", SAME, SAME, SAME),
    row(runs.hook_of_the_root, "vit", SAME, SAME, SAME),
    row(runs.changing_hook, "resnet", SAME, NOT, SAME, cut=False),  # those of a view are for all who have it
    row(runs.backward_hook, "resnet", SAME, SAME, SAME),
    row(runs.global_hook, "resnet", SAME, SAME, SAME),
    # graphs and exports
    row(runs.symbolic_trace, "resnet", or_refused(SubnetActError, "SubnetSpec"), SAME, SAME),
    row(runs.operations_trace, "vit", SAME, SAME, SAME),
    row(runs.fused_graph, "resnet", NOT, SAME, SAME),
    row(runs.feature_extractor, "resnet", NOT, OR_SHARES, SAME),
    row(runs.script_trace, "resnet", NOT, SAME, SAME),
    row(runs.script, "resnet", NOT, NOT, SAME),
    row(runs.export, "vit", NOT, SAME, SAME),
    row(runs.onnx, "resnet", NOT, SAME, NOT, needs="onnxscript"),
    row(runs.compiled_in_place, "vit", SAME, SAME, NOT),
    row(runs.compiled, "vit", SAME, SAME, SAME),
    row(runs.fake_tensors, "vit", SAME, SAME, SAME),
]

COLUMNS = ("supernet", "view", "extract", "engine")
