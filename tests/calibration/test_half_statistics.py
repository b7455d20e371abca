"""Statistics are measurements: a network of half precision has them at float32, and reads them rightly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_network import supernet_of
from torch import Tensor, nn
from torch.nn import functional as F

import subnetact
from subnetact import Supernet, calibrate
from subnetact.errors import SpecError
from subnetact.supernet.norm_table import NormTable

TOLERANCES = {torch.float16: 5e-3, torch.bfloat16: 5e-2, torch.float32: 5e-6, torch.float64: 5e-6}
X = torch.randn(32, 3, 4, 4, generator=torch.Generator().manual_seed(3))


def network(scale: float = 1.0) -> nn.Module:
    """Return a network whose BatchNorm sees numbers of a standard deviation of about `scale`."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    with torch.no_grad():
        made[0].weight.mul_(2 * scale)
    return made


def measured(scale: float = 1.0) -> Supernet:
    """Return a float32 supernet with a row for every subnet."""
    supernet = supernet_of(network(scale))
    calibrate(supernet, list(supernet.space.enumerate()), [X], progress=False)
    return supernet


def converted(exact: Supernet, other: Supernet, path: Path) -> Supernet:
    return exact.to(other.network[0].weight.dtype)


def assigned(exact: Supernet, other: Supernet, path: Path) -> Supernet:
    other.norms = exact.norms
    return other


def updated(exact: Supernet, other: Supernet, path: Path) -> Supernet:
    other.norms.update(exact.norms.rows)
    return other


def loaded(exact: Supernet, other: Supernet, path: Path) -> Supernet:
    exact.norms.save(path / "norms.safetensors")
    other.load_state_dict(other.state_dict(), norms=NormTable.load(path / "norms.safetensors"))
    return other


def copied(exact: Supernet, other: Supernet, path: Path) -> Supernet:
    return copy.deepcopy(converted(exact, other, path))


def of_a_bundle(exact: Supernet, other: Supernet, path: Path) -> Supernet:
    converted(exact, other, path).save_pretrained(path / "bundle")
    return subnetact.from_pretrained(path / "bundle", model=other)  # type: ignore[return-value]


def there_and_back(exact: Supernet, other: Supernet, path: Path) -> Supernet:
    return exact.half().bfloat16().to(other.network[0].weight.dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "door",
    [converted, assigned, updated, loaded, copied, of_a_bundle, there_and_back],
    ids=lambda d: d.__name__,
)
def test_rows_stay_exact_and_are_read_rightly(
    door: Callable[[Supernet, Supernet, Path], Supernet], dtype: torch.dtype, tmp_path: Path
) -> None:
    specs = list(measured().space.enumerate())
    rows = {spec: row.flat.clone() for spec, row in measured().norms.rows.items()}
    expected = {spec: measured()(X, subnet=spec) for spec in specs}
    supernet = door(measured(), supernet_of(network()).to(dtype), tmp_path)
    kept = torch.float64 if dtype is torch.float64 else torch.float32
    engine = subnetact.Engine(supernet, specs, example=X[:1].to(dtype))
    weight_digits = 20 if door is there_and_back else 1
    for i, spec in enumerate(specs):
        row = supernet.norms.get(spec)
        assert row is not None
        assert row.flat.dtype is kept
        assert torch.equal(row.flat, rows[spec].to(kept))
        assert {t.dtype for pair in supernet.statistics(spec).values() for t in pair} == {dtype}
        for found in (
            supernet(X.to(dtype), subnet=spec),
            supernet.extract(spec)(X.to(dtype)),
            engine(X.to(dtype), i),
        ):
            assert found.dtype is dtype
            tolerance = max(TOLERANCES[dtype], TOLERANCES[torch.bfloat16] if weight_digits > 1 else 0)
            torch.testing.assert_close(found.float(), expected[spec], rtol=0, atol=tolerance)


USES: dict[str, Callable[[Supernet, Any, Path], Any]] = {
    "view": lambda s, spec, _: s.subnet(spec),
    "call": lambda s, spec, _: s(X.half(), subnet=spec),
    "extract": lambda s, spec, _: s.extract(spec),
    "engine": lambda s, spec, _: subnetact.Engine(s, [spec], example=X[:1].half()),
    "bundle": lambda s, _, path: s.save_pretrained(path / "bundle"),
    "state_dict": lambda s, *_: s.state_dict(),
    "calibrate": lambda s, spec, _: calibrate(s, [spec], [X.half()], progress=False),
}


@pytest.mark.parametrize("use", USES)
def test_statistics_that_overflow_are_refused_where_they_are_read(use: str, tmp_path: Path) -> None:
    exact = measured(500.0)
    supernet, spec = measured(500.0).half(), exact.space.smallest()
    with pytest.raises(SpecError, match=r"^1: its statistics are not finite at float16: .* norm\.float\(\)"):
        USES[use](supernet, spec, tmp_path)
    for norm in supernet.norm_operators().values():  # as the message says
        norm.float()
    USES[use](supernet, spec, tmp_path)
    expected = exact(X, subnet=spec)
    torch.testing.assert_close(supernet(X.half(), subnet=spec).float(), expected, rtol=0, atol=5e-3)


def test_shared_statistics_that_overflowed_are_refused() -> None:
    original = network()
    nn.init.constant_(original[1].running_var, 1e5)
    supernet = supernet_of(original).half()
    with pytest.raises(SpecError, match="above 65504 overflows"):
        supernet.subnet(supernet.space.largest())


def test_an_average_of_many_batches_is_one_of_float32() -> None:
    supernet = supernet_of(network()).bfloat16()
    spec = supernet.space.smallest()
    noise = torch.randn(300, 4, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    batches = list((noise * torch.linspace(0.2, 3, 300).view(-1, 1, 1, 1, 1)).bfloat16())  # in order of size
    calibrate(supernet, [spec], batches, progress=False)
    weight, bias = (t[:4] for t in (supernet.network[0].weight, supernet.network[0].bias))
    seen = [F.conv2d(x, weight, bias).double() for x in batches]
    row = supernet.norms.get(spec)
    assert row is not None
    mean, var = row.pairs()["1"]
    mean_of: Callable[[list[Tensor]], Tensor] = lambda parts: torch.stack(parts).mean(0).float()  # noqa: E731
    torch.testing.assert_close(mean, mean_of([y.mean((0, 2, 3)) for y in seen]), rtol=1e-4, atol=1e-5)
    exact = mean_of([y.var((0, 2, 3), unbiased=False) for y in seen])
    torch.testing.assert_close(var, exact, rtol=1e-4, atol=0)
