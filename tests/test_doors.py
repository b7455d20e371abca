"""Others' tools do to a supernet, a view, an extract and an engine what the table of doors says.

Every cell is run. Whatever is done to a view or an extract, everybody else's answers stay as they were, and
cached views and engines still follow the weights.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import door_changes as changes
import door_runs as runs
import pytest
import torch
from door_models import Door, compute, equal
from door_table import COLUMNS, TABLE, Outcome, Row
from torch import nn

pytest.importorskip("timm")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the tools


def cells() -> Iterator[Any]:
    """Yield every cell that is meant, with its name."""
    for each in TABLE:
        for column, outcome in zip(COLUMNS, each.cells, strict=True):
            if outcome is not None:
                name = f"{each.act.__name__}-{each.kind}-{column}"
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
