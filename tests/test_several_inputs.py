"""Networks of several inputs: calibration, evaluation, costs and engines take tuples and mappings."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from elastic_networks import PARTS as ALL
from elastic_networks import one_width, width_space
from torch import Tensor, nn
from torch.nn import functional as F

from subnetact import Engine, Supernet, calibrate, evaluate, insert_
from subnetact.costs import CostModel
from subnetact.errors import InvalidRequest, SpecError
from subnetact.supernet.batches import tensors_of
from subnetact.supernet.statistics import statistics_of


class TwoInputs(nn.Module):
    """Adds a gated image to an image, and returns class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.gate = nn.Linear(4, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor, extra: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.bn(self.conv(image)))
        gated = x * self.gate(extra)[:, :, None, None]
        return {"logits": self.head(gated.mean((2, 3)))}


PARTS = {"conv": "out", "bn": "norm", "gate": "out", "head": "in"}


def two_inputs(network: nn.Module | None = None) -> Supernet:
    return one_width(network or TwoInputs(), PARTS)


def batch(n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 8, 8), torch.randn(n, 4)


FORMS: dict[str, Any] = {
    "tuple": lambda image, extra: (image, extra),
    "list": lambda image, extra: [image, extra],
    "dictionary": lambda image, extra: {"image": image, "extra": extra},
    "mapping": lambda image, extra: UserDict(image=image, extra=extra),
}


def by_hand(supernet: Supernet, image: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of the convolution's output, computed without the library."""
    conv = supernet.extract(supernet.space.largest()).conv
    y = F.conv2d(image, conv.weight[:width], conv.bias[:width], padding=1)
    return y.mean((0, 2, 3)), y.var((0, 2, 3), unbiased=False)


def require_statistics(supernet: Supernet, seen: Tensor) -> None:
    for spec, width in ((supernet.space.smallest(), 4), (supernet.space.largest(), 8)):
        for found, expected in zip(
            statistics_of(supernet, spec)["bn"], by_hand(supernet, seen, width), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=5e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["tuple", "list", "dictionary", "mapping"])
def test_calibration_gives_the_statistics_of_the_inputs(form: str) -> None:
    (image, extra), zeros = batch(), torch.zeros(6)
    given: Any = FORMS[form](image, extra)
    for labels, one in ((False, given), (True, (given, zeros)), (True, [given, zeros])):  # as a DataLoader
        supernet = two_inputs()
        specs = [supernet.space.smallest(), supernet.space.largest()]
        assert calibrate(supernet, specs, [one], labels=labels).subnets == 2
        require_statistics(supernet, image)


class GateFirst(TwoInputs):
    """The gate changes what the BatchNorm sees, so that its statistics tell whether both inputs came."""

    def forward(self, image: Tensor, extra: Tensor | None = None) -> dict[str, Tensor]:
        return super().forward(image if extra is None else image * extra[:, :1, None, None], torch.ones(6, 4))


@pytest.mark.parametrize("labels", [False, True])
def test_labels_are_named_and_not_guessed(labels: bool) -> None:
    """The network takes one or two arguments, so that a pair is either arguments or inputs with labels."""
    supernet, (image, extra) = two_inputs(GateFirst()), batch()
    specs = [supernet.space.smallest(), supernet.space.largest()]
    calibrate(supernet, specs, [(image, extra)], labels=labels)
    seen = image if labels else image * extra[:, :1, None, None]
    require_statistics(supernet, seen)


def test_labels_that_are_not_named_are_refused_before_anything_runs() -> None:
    ran: list[Tensor] = []

    class Noting(TwoInputs):
        def forward(self, image: Tensor, extra: Tensor) -> dict[str, Tensor]:
            if isinstance(image, Tensor):  # and not a trace
                ran.append(image)
            return super().forward(image, extra)

    supernet, (image, extra) = two_inputs(Noting()), batch()
    specs = [supernet.space.smallest()]
    tensor = r"a torch\.float32 tensor of shape \(6, 4\)"
    with pytest.raises(
        SpecError, match=rf"{tensor}, a torch\.int64 tensor.*too many.*give calibrate labels=True"
    ):
        calibrate(supernet, specs, [(image, extra, torch.arange(6))])
    with pytest.raises(SpecError, match=r"missing a required argument: 'extra'.*give calibrate labels=True"):
        calibrate(supernet, specs, [[image]])
    for wrong in ((image, extra, torch.arange(6)), {"image": image, "extra": extra}, image):
        with pytest.raises(SpecError, match=r"labels=True: a batch is a pair \(inputs, labels\), got a"):
            calibrate(supernet, specs, [wrong], labels=True)
    for value in ("yes", 0, None):
        with pytest.raises(SpecError, match=f"labels: {value!r} is no truth value"):
            calibrate(supernet, specs, [(image, extra)], labels=value)  # type: ignore[arg-type]
    assert not ran
    assert not supernet.norms
    calibrate(supernet, specs, [(image, extra)])
    assert ran


@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
def test_bad_batches_are_named() -> None:
    supernet, (image, _) = two_inputs(), batch()
    specs = [supernet.space.smallest()]
    pair = r"a batch is a pair \(inputs, labels\), got a"
    for one, words in (
        *((wrong, pair) for wrong in ({"image": image}, {"image": image, "labels": image}, (image,))),
        (((image, image[:3]), torch.zeros(6)), r"a batch has labels of shape \(N,\).*\(3, 3, 8, 8\)"),
        ((image, 6), "inputs and labels of a batch are tensors"),
    ):
        with pytest.raises(SpecError, match=f"evaluate: {words}"):
            evaluate(supernet, specs, [one])
    assert not supernet.norms


def test_evaluation_counts_right_answers() -> None:
    supernet, (image, extra) = two_inputs(), batch(40)
    specs = [supernet.space.smallest(), supernet.space.largest()]
    calibrate(supernet, specs, [{"image": image, "extra": extra}])
    with torch.no_grad():
        labels = supernet.extract(specs[0])(image, extra)["logits"].argmax(1)
        agree = supernet.extract(specs[1])(image, extra)["logits"].argmax(1) == labels
    expected = [100.0, 100 * float(agree.float().mean())]
    named = UserDict(image=image, extra=extra)
    for loader in ([((image, extra), labels)], [(named, labels)], [[[image, extra], labels]]):
        assert evaluate(supernet, specs, loader) == pytest.approx(expected)


def test_costs_count_all_inputs() -> None:
    supernet, (image, extra) = two_inputs(), batch()
    found = CostModel(supernet, {"image": image, "extra": extra})(supernet.space.smallest())
    assert found.macs == 8 * 8 * 27 * 4 + 4 * 4 + 4 * 5
    assert found == CostModel(supernet, (image, extra))(supernet.space.smallest())
    with pytest.raises(SpecError, match="a dictionary of 'image'"):
        CostModel(supernet, {"image": image})


@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
def test_an_elastic_description_by_hand_takes_a_tokenizers_kind_of_mapping() -> None:
    (image, extra), network = batch(), TwoInputs().eval()
    expected, elastic = network(image, extra)["logits"], {path: ALL[part] for path, part in PARTS.items()}
    supernet = insert_(network, width_space(), elastic, example=UserDict(image=image, extra=extra))
    found = supernet(image, extra, subnet=supernet.space.largest())["logits"]
    torch.testing.assert_close(found, expected)
    with pytest.raises(SpecError, match="unexpected keyword argument 'picture'"):
        insert_(TwoInputs().eval(), width_space(), elastic, example=UserDict(picture=image, extra=extra))


class Mixed(TwoInputs):
    """Has a linear layer that is packed in fused programs, wherever oneMKL is."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(512, 512)

    def forward(self, image: Tensor, extra: Tensor) -> dict[str, Tensor]:
        mixed = self.mix(F.pad(extra, (0, 508)))
        return {"logits": super().forward(image, extra)["logits"] + mixed[:, :5]}


@pytest.mark.parametrize("way", ["call", "run", "blocks"])
@pytest.mark.parametrize("form", sorted(FORMS.keys() - {"list"}))  # a list is one example per shape
def test_the_first_batch_is_the_example_of_an_engine_without_one(form: str, way: str) -> None:
    supernet, (image, extra), make = two_inputs(Mixed()), batch(), FORMS[form]
    spec = supernet.space.smallest()
    calibrate(supernet, [spec], [{"image": image, "extra": extra}])
    given = Engine(supernet, [spec], example=make(image, extra))
    engine = Engine(supernet, [spec])
    singles = [make(image[i], extra[i]) for i in range(6)]
    if way == "call":
        engine(make(image, extra), 0)
    elif way == "run":
        engine.run(0, singles, 6)
    else:
        assert engine.start(0, singles, 6).step()
    assert engine.is_fused(0) == given.is_fused(0) == torch.backends.mkl.is_available()
    assert engine.stats().unfused == given.stats().unfused
    for mine, expected in zip(tensors_of(engine.sample), tensors_of(given.sample), strict=True):
        assert torch.equal(mine, expected)
    engine.check(singles[0])
    with pytest.raises(InvalidRequest, match="without a batch dimension"):
        engine.check(make(image, extra))


@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
def test_a_batch_that_is_no_example_still_runs() -> None:
    """The network broadcasts the gate, so its inputs are no samples of one size."""
    supernet, (image, extra) = two_inputs(), batch()
    spec = supernet.space.smallest()
    engine = Engine(supernet, [spec], allow_uncalibrated=True)
    output = engine((image, extra[:1]), 0)["logits"]
    torch.testing.assert_close(output, supernet(image, extra[:1], subnet=spec)["logits"])
    with pytest.raises(InvalidRequest, match="no input yet"):
        engine.sample  # noqa: B018
    engine((image, extra), 0)
    assert len(engine.samples) == 1
