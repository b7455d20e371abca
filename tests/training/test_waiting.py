"""What a GPU is waited for: not for every subnet, nor for every batch of an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distilled import labelled, new_supernet
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import subnetact
from subnetact.operators.tensor_version import changes_of
from subnetact.supernet.supernet import Supernet
from subnetact.training import distill_

ATEN = torch.ops.aten
WAITS = (
    ATEN._local_scalar_dense.default,
    ATEN.nonzero.default,
    ATEN.equal.default,
    ATEN.masked_select.default,
)


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a GPU would be waited for, `waits`, and the copies of some tensors, `copies`."""

    def __init__(self, watched: list[Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()
        self.watched = {tensor.data_ptr() for tensor in watched or ()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func in (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default) and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        self.counts["waits"] += func in WAITS or masks
        self.counts["copies"] += func is ATEN.clone.default and args[0].data_ptr() in self.watched
        return func(*args, **(kwargs or {}))


def images() -> tuple[Supernet, list[Any], dict[str, Any]]:
    batches = [(x, torch.where(torch.arange(16) % 3 == 0, -100, y)) for x, y in labelled(3, 1)]
    return new_supernet(), batches, {}


class Words(nn.Module):
    """Maps tokens (N, T) to scores (N, T, 50); it waits for nothing, unlike the masks of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(50, 8), nn.Linear(8, 32), nn.Linear(32, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.words(x)).relu())  # type: ignore[no-any-return]


def texts() -> tuple[Supernet, list[Any], dict[str, Any]]:
    torch.manual_seed(0)
    ids = torch.randint(3, 50, (2, 9))
    supernet = subnetact.insert_(Words().eval(), example=ids, choices=(0.25, 0.5, 0.75, 1.0))
    return supernet, [(ids, torch.where(ids % 5 == 0, -100, ids))] * 3, {"task": "tokens", "labels": True}


@pytest.mark.parametrize("make", [images, texts])
@pytest.mark.parametrize("distillation", [1.0, 0.5])
def test_a_step_waits_once_however_many_subnets_it_trains(
    make: Callable[[], tuple[Supernet, list[Any], dict[str, Any]]], distillation: float
) -> None:
    waits = set()
    for number in (0, 6):
        supernet, batches, options = make()
        options |= {"random_subnets": number, "distillation": distillation, "progress": False}
        with Calls() as calls:
            distill_(supernet, batches[:2], held_out=batches[2:], steps=4, importance=None, **options)
        waits.add(calls.counts["waits"])
    assert len(waits) == 1


def test_running_statistics_are_not_copied_in_every_step() -> None:
    copies = set()
    for steps in (2, 6):
        supernet = new_supernet()
        running = [norm.get_buffer("running_mean") for norm in supernet.norm_operators().values()]
        with Calls(running) as calls:
            distill_(
                supernet,
                labelled(2, 1),
                held_out=labelled(1, 2),
                steps=steps,
                random_subnets=0,
                progress=False,
            )
        copies.add(calls.counts["copies"])
    assert len(copies) == 1


def test_an_evaluation_reads_one_number_per_subnet(digits: Supernet, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [(torch.randn(4, 1, 16, 16), torch.arange(4)) for _ in range(5)]
    specs = [digits.space.smallest(), digits.space.largest()]
    subnetact.calibrate(digits, specs, [batches[0][0]])
    read = list[Tensor]()

    def counting(tensor: Tensor) -> int:
        read.append(tensor)
        return int(tensor.numpy())

    monkeypatch.setattr(Tensor, "__int__", counting)
    subnetact.evaluate(digits, specs, batches, progress=False)
    assert len(read) == len(specs)


def test_a_compiled_fused_step_counts_as_a_change() -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    torch.autograd.backward(layer(torch.randn(2, 4)).sum())
    before = changes_of(layer.parameters())
    torch.compile(optimizer.step, backend="aot_eager")()
    assert changes_of(layer.parameters()) > before
