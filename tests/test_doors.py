"""Others' tools do to a supernet, a view, an extract and an engine what the table of doors says.

Every cell is run. Whatever is done to a view or an extract, everybody else's answers stay as they were, and
cached views and engines still follow the weights.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from door_acts import act_of
from door_models import Door, compute, equal
from torch import nn

from subnetact.errors import EngineError, InsertError, SubnetActError, TrainingError, ViewError

pytest.importorskip("timm")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the tools


@dataclass(frozen=True)
class Outcome:
    """What a cell of the table says: the subject does as an ordinary module, or refuses, or either."""

    same: bool = True
    error: Any = None  # with which it may refuse, naming `names`
    names: str = ""
    shared: bool = False  # the act writes the weights, of which there is one copy for all subnets
    late: bool = False  # it is refused when the changed model runs, and not before
    beneath: bool = False  # the act is done to the supernet of the engine


SAME, WRITES, FOLLOWS = Outcome(), Outcome(shared=True), Outcome(beneath=True)
NOT = None
"""Not meant."""
Errors = type[BaseException] | tuple[type[BaseException], ...]


def refused(error: Errors, names: str, **options: bool) -> Outcome:
    return Outcome(same=False, error=error, names=names, **options)


def or_refused(error: Errors, names: str, **options: bool) -> Outcome:
    return Outcome(error=error, names=names, **options)


SHARES = refused(ViewError, "extract")
OR_SHARES = or_refused(ViewError, "extract|deepcopy")
BUNDLE = refused(EngineError, r"Engine\.load")
OR_OF_A_SUBNET = or_refused((AttributeError, SubnetActError), r"subnet\(spec\)|supernet\.network")
FOREIGN = or_refused(
    (ViewError, RuntimeError, NotImplementedError), "extract|contiguous|stride|require gradient"
)
"""Torch refuses the strides of a view, or that it is frozen."""
PARTLY = or_refused(SubnetActError, "only=|as_pretrained")
NEEDS_SANDWICH = refused(TrainingError, r"SandwichTraining.*supernet\.network")
INSERT_AGAIN = or_refused(SubnetActError, r"remove\(\)|insert_|subnet\(spec\)", late=True)


@dataclass(frozen=True)
class Row:
    """One act, by its name, on one kind of model: what a supernet, a view, an extract and an engine do."""

    act: str
    kind: str
    cells: tuple[Outcome | None, ...]
    tolerance: float = 5e-5  # how far results may be apart, more in half precision
    after: bool = True  # the model runs after the act
    cut: bool = True  # a small model can be cut out of an ordinary model after the act
    needs: str = "torch"  # a library without which the row is skipped


def row(
    act: str, kind: str, supernet: Any, view: Any, extract: Any, engine: Any = NOT, **options: Any
) -> Row:
    return Row(act, kind, (supernet, view, extract, engine), **options)


TABLE = [
    # act, kind of model, supernet, view, extract, engine
    row("state_dict_elsewhere", "llama", SAME, SAME, SAME),
    row("state_dict_elsewhere", "resnet", SAME, SAME, SAME),
    row("load_state_dict", "llama", SAME, SHARES, SAME, FOLLOWS),
    row("load_state_dict", "resnet", SAME, SHARES, SAME),
    row("load_by_assignment", "llama", SAME, SHARES, SAME, FOLLOWS),
    row("load_without_tied_name", "tied", SAME, SHARES, SAME, FOLLOWS),
    row("save_and_load_weights", "llama", SAME, SAME, SAME),
    row("saved_tensor_hides_nothing", "vit", SAME, SAME, SAME),
    row("pickle_module", "llama", SAME, SHARES, SAME, BUNDLE),
    row("shallow_copy", "llama", refused(ViewError, "deepcopy"), SAME, SAME, BUNDLE),
    row("deep_copy", "llama", SAME, SAME, SAME, BUNDLE),
    row("deep_copy", "tied", SAME, SAME, SAME),
    row("safetensors_save_model", "tied", SAME, SAME, SAME),
    row("safetensors_load_model", "tied", SAME, SHARES, SAME, FOLLOWS),
    row("save_pretrained", "llama", SAME, PARTLY, PARTLY),
    row("save_pretrained", "tied", SAME, PARTLY, PARTLY),
    row("distributed_state_dict", "llama", SAME, SAME, SAME),
    row("load_a_part", "llama", SAME, SHARES, SAME, FOLLOWS),
    row("load_through_a_parent", "llama", SAME, SHARES, SAME, FOLLOWS),
    row("state_with_gradients", "llama", SAME, SAME, SAME),
    row("to_numpy", "llama", SAME, SAME, SAME),
    row("share_memory", "llama", SAME, SAME, SAME, FOLLOWS),
    row("memory_format", "resnet", SAME, SHARES, SAME, FOLLOWS),
    row("insert_again", "llama", NOT, NOT, refused(InsertError, "as_pretrained"), after=False),
    # dtypes, devices and modes
    row("half", "llama", SAME, SHARES, SAME, FOLLOWS, tolerance=0.02),
    row("half", "resnet", SAME, SHARES, SAME, FOLLOWS, tolerance=0.02),
    row("bfloat16", "llama", SAME, SHARES, SAME, FOLLOWS, tolerance=0.1),
    row("bfloat16", "vit", SAME, SHARES, SAME, FOLLOWS, tolerance=0.1),
    row("double", "resnet", SAME, SHARES, SAME, FOLLOWS),
    row("double_by_swapping", "llama", or_refused(RuntimeError, "swap"), SHARES, SAME),
    row("double_by_overwriting", "llama", SAME, SHARES, SAME, FOLLOWS),
    row("to_meta", "llama", SAME, SHARES, SAME, after=False),
    row("double_of_a_parent", "llama", SAME, SHARES, SAME, FOLLOWS),
    row("train_mode", "resnet", SAME, SHARES, SAME),
    row("assign_training", "resnet", NOT, OR_SHARES, SAME),
    row("eval_mode", "llama", SAME, SAME, SAME, FOLLOWS),
    row("requires_grad_on", "llama", SAME, SHARES, SAME),
    row("requires_grad_off", "llama", SAME, SAME, SAME, FOLLOWS),
    row("zero_grad", "llama", SAME, SAME, SAME, FOLLOWS),
    # values
    row("halve_in_place", "llama", SAME, WRITES, SAME, FOLLOWS),
    row("halve_in_place", "resnet", SAME, WRITES, SAME, FOLLOWS),
    row("initialise_one", "llama", SAME, WRITES, SAME, FOLLOWS),
    row("assign_data", "llama", SAME, NOT, SAME, FOLLOWS),
    row("write_by_numpy", "llama", SAME, WRITES, SAME, FOLLOWS),
    row("optimizer_step", "llama", SAME, SHARES, SAME, FOLLOWS),
    row("optimizer_step", "tied", SAME, SHARES, SAME, FOLLOWS),
    row("optimizer_step", "vit", SAME, SHARES, SAME, FOLLOWS),
    row("replace_tensors", "llama", SAME, OR_SHARES, SAME, FOLLOWS, needs="accelerate"),
    row("trainer_step", "llama", NEEDS_SANDWICH, SHARES, SAME, needs="accelerate"),
    row("trainer_step", "tied", NEEDS_SANDWICH, SHARES, SAME, needs="accelerate"),
    row("update_bn", "resnet", or_refused(SubnetActError, "calibrate"), SHARES, SAME),
    # modules
    row("new_head", "resnet", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row("new_head", "vit", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row("new_head_on_itself", "resnet", or_refused(SubnetActError, "network"), OR_SHARES, SAME, cut=False),
    row("write_modules", "resnet", SAME, OR_SHARES, SAME, cut=False),
    row("swap_class", "llama", NOT, OR_SHARES, SAME),
    row("delete_module", "llama", SAME, OR_SHARES, SAME, after=False),
    row("delete_bias", "resnet", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row("reset_classifier", "resnet", INSERT_AGAIN, OR_SHARES, SAME, after=False),
    row("reset_classifier", "vit", INSERT_AGAIN, OR_SHARES, SAME, after=False),
    row("register_buffer", "llama", SAME, OR_SHARES, SAME, FOLLOWS),
    row("register_parameter", "llama", SAME, OR_SHARES, SAME, FOLLOWS),
    row("assign_weight", "llama", SAME, OR_SHARES, SAME, FOLLOWS),
    row("assign_weight", "vit", SAME, OR_SHARES, SAME, FOLLOWS),
    row("write_registry", "llama", NOT, OR_SHARES, SAME),
    row("wrap_forward", "llama", INSERT_AGAIN, OR_SHARES, SAME),
    row("resize_token_embeddings", "llama", INSERT_AGAIN, OR_SHARES, SAME, FOLLOWS),
    row("resize_token_embeddings", "tied", INSERT_AGAIN, OR_SHARES, SAME, FOLLOWS),
    row("tie_weights", "tied", SAME, OR_SHARES, SAME, FOLLOWS),
    row("prune_and_remove", "llama", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row("prune_global", "resnet", INSERT_AGAIN, FOREIGN, SAME, cut=False),
    row("register_parametrization", "llama", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row("old_weight_norm", "llama", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row("quantize_dynamic", "llama", NOT, NOT, SAME),
    row("convert_sync_batchnorm", "resnet", INSERT_AGAIN, OR_SHARES, SAME, cut=False),
    row("offload", "llama", NOT, OR_SHARES, SAME, needs="accelerate"),
    row("low_rank_adapters", "llama", SAME, OR_SHARES, SAME, FOLLOWS, cut=False, needs="peft"),
    row("fully_shard", "llama", SAME, FOREIGN, SAME, after=False),
    # settings
    row("change_epsilon", "vit", SAME, OR_SHARES, SAME),
    row("set_attention", "llama", NOT, OR_SHARES, SAME),
    row("set_configuration", "llama", NOT, SAME, SAME),
    row("wrap_for_checkpointing", "llama", SAME, OR_SHARES, SAME, cut=False),
    row("set_checkpointing", "llama", SAME, NOT, SAME, FOLLOWS),
    row("set_checkpointing", "vit", SAME, NOT, SAME, FOLLOWS),
    row("set_input_gradients", "llama", NOT, OR_SHARES, SAME),
    row("plain_attribute", "llama", SAME, SAME, SAME, FOLLOWS),
    # calls
    row("call_by_name", "llama", SAME, SAME, SAME),
    row("signature", "llama", NOT, SAME, SAME),
    row("autocast", "llama", SAME, SAME, SAME, SAME, tolerance=0.1),
    row("autocast", "resnet", SAME, SAME, SAME, SAME, tolerance=0.1),
    row("inference_mode", "resnet", SAME, SAME, SAME, SAME),
    row("two_threads", "vit", SAME, SAME, SAME, SAME),
    row("distributed_data_parallel", "llama", SAME, SHARES, SAME),
    row("generate", "llama", SAME, SAME, SAME),
    row("generate_by_a_draft", "llama", SAME, SAME, SAME),
    row("functional_call", "resnet", NOT, SAME, SAME),  # statistics of a supernet are those of the row
    row("functional_call", "vit", SAME, SAME, SAME),
    row("functional_call_meanwhile", "llama", NOT, OR_SHARES, SAME),
    # what a model says of itself
    row("count_parameters", "llama", SAME, SAME, SAME),
    row("memory_footprint", "llama", OR_OF_A_SUBNET, SAME, SAME),
    row("device_and_dtype", "llama", SAME, SAME, SAME),
    row("isinstance_of_its_class", "vit", NOT, SAME, SAME),
    row("exact_class", "vit", NOT, NOT, SAME),
    row("number_of_features", "resnet", NOT, SAME, SAME),
    row("number_of_features", "vit", NOT, SAME, SAME),
    row("feature_information", "resnet", NOT, SAME, SAME),
    row("configuration_of_sizes", "llama", SAME, SAME, SAME),
    row("weight_decay_names", "vit", SAME, SAME, SAME),
    # hooks
    row("hook_of_a_layer", "llama", SAME, SAME, SAME),
    row("hook_of_a_layer", "resnet", SAME, SAME, SAME),
    row("backward_hook", "resnet", SAME, SAME, SAME),
    # graphs and exports
    row("symbolic_trace", "resnet", or_refused(SubnetActError, "SubnetSpec"), SAME, SAME),
    row("feature_extractor", "resnet", NOT, OR_SHARES, SAME),
    row("script_trace", "resnet", NOT, SAME, SAME),
    row("script", "resnet", NOT, NOT, SAME),
    row("export", "vit", NOT, SAME, SAME),
    row("compiled_in_place", "vit", SAME, SAME, NOT),
    row("compiled", "vit", SAME, SAME, SAME),
]

COLUMNS = ("supernet", "view", "extract", "engine")


def cells() -> Iterator[Any]:
    for each in TABLE:
        for column, outcome in zip(COLUMNS, each.cells, strict=True):
            if outcome is not None:
                name = f"{each.act}-{each.kind}-{column}"
                yield pytest.param(each, column, outcome, id=name)


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
    act = act_of(each.act)
    expected = value(act(ordinary, door), door)
    subject = door.subject(column)
    if outcome.beneath:
        door.served()
    torch.manual_seed(0)
    result = value(act(door.supernet if outcome.beneath else subject, door), door)
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
    if each.act in ("fully_shard", "distributed_data_parallel"):
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
