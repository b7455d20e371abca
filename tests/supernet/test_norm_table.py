"""Every statistics row owns its tensor; the file of a norm table stores what rows have in common once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import subnetact
from subnetact.errors import FileFormatError
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormRow, NormTable
from subnetact.supernet.supernet import Supernet


def spec(i: int) -> SubnetSpec:
    return SubnetSpec("s", (("a", (i,)),))


def statistics(*seeds: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return statistics of BatchNorms `n0`, `n1`, ... with 3, 4, ... channels; one seed decides each."""
    found = {}
    for i, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(100 * i + seed)
        found[f"n{i}"] = torch.randn(3 + i, generator=generator), torch.rand(3 + i, generator=generator)
    return found


def table(*rows: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> NormTable:
    made = NormTable("s")
    for i, row in enumerate(rows):
        made.update({spec(i): NormRow.of(row)})
    return made


def bytes_in(path: Path) -> dict[str, int]:
    return {name: t.numel() * t.element_size() for name, t in load_file(path).items()}


def equal(row: NormRow, expected: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> bool:
    found = row.pairs()
    return list(found) == list(expected) and all(
        torch.equal(a, b) for name in expected for a, b in zip(found[name], expected[name], strict=True)
    )


ROWS = [statistics(0, 0, 0), statistics(0, 0, 1), statistics(0, 2, 1), statistics(5, 0)]
WHOLE = 2 * 4 * (12 * 3 + 7)
"""Bytes of all rows."""
DISTINCT = 2 * 4 * ((3 + 3) + (4 + 4) + (5 + 5))
"""Bytes of the distinct statistics: n0 has the seeds 0 and 5, n1 has 0 and 2, n2 has 0 and 1."""


def test_rows_own_their_tensors() -> None:
    made = table(*ROWS)
    assert made.nbytes() == sum(made.get(s).nbytes for s in made) == WHOLE
    for i, expected in enumerate(ROWS):
        assert equal(made.get(spec(i)), expected)
    made.get(spec(0)).flat.mul_(2)
    assert equal(made.get(spec(0)), {n: (2 * m, 2 * v) for n, (m, v) in ROWS[0].items()})
    for i, expected in enumerate(ROWS[1:], start=1):
        assert equal(made.get(spec(i)), expected)


def test_a_loaded_row_owns_its_tensor_too(tmp_path: Path) -> None:
    table(*ROWS).save(tmp_path / "norms.safetensors")
    loaded = NormTable.load(tmp_path / "norms.safetensors")
    loaded.get(spec(0)).flat.mul_(2)
    for i, expected in enumerate(ROWS[1:], start=1):
        assert equal(loaded.get(spec(i)), expected)


def test_equal_numbers_of_another_norm_or_dtype_are_not_shared(tmp_path: Path) -> None:
    one, path = torch.ones(3), tmp_path / "norms.safetensors"
    table({"a": (one, one)}, {"b": (one, one)}, {"a": (one.double(), one.double())}).save(path)
    assert bytes_in(path) == {"float32": 24 + 24, "float64": 48}
    assert NormTable.load(path).get(spec(2))["a"][0].dtype == torch.float64


def test_rows_keep_their_identity_while_others_come() -> None:
    made = table(*ROWS[:2])
    before = made.get(spec(0)), made.get(spec(1))
    made.update({spec(2): NormRow.of(ROWS[2])})
    assert (made.get(spec(0)), made.get(spec(1))) == before
    assert made.get(spec(0)) is before[0]
    made.update({spec(0): NormRow.of(ROWS[0])})
    assert equal(made.get(spec(0)), ROWS[0])
    assert equal(made.get(spec(1)), ROWS[1])


def test_an_update_during_another_one_loses_no_row() -> None:
    made = NormTable("s")
    other = threading.Thread(target=made.update, args=({spec(1): NormRow.of(ROWS[1])},))

    class Rows(dict[SubnetSpec, NormRow]):
        def items(self) -> Any:
            other.start()
            other.join()
            return super().items()

    made.update(Rows({spec(0): NormRow.of(ROWS[0])}))
    assert set(made) == {spec(0), spec(1)}


def test_the_file_holds_equal_statistics_once_and_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "norms.safetensors"
    made = table(*ROWS, {"n0": tuple(t.double() for t in ROWS[0]["n0"])})
    made.save(path)
    assert bytes_in(path) == {"float32": DISTINCT, "float64": 48}
    loaded = NormTable.load(path)
    assert list(loaded) == list(made)
    assert loaded.nbytes() == WHOLE + 48
    for i, expected in enumerate(ROWS):
        assert equal(loaded.get(spec(i)), expected)
    loaded.update({spec(9): NormRow.of(ROWS[1])})
    loaded.save(path)
    assert bytes_in(path) == {"float32": DISTINCT, "float64": 48}
    loaded.get(spec(9)).flat.mul_(2)
    loaded.save(path)
    assert bytes_in(path) == {"float32": DISTINCT + loaded.get(spec(9)).nbytes, "float64": 48}
    loaded.apply(lambda t: t.half())
    assert loaded.nbytes() == (WHOLE + loaded.get(spec(9)).nbytes * 2) // 2 + 12
    loaded.save(path)
    assert NormTable.load(path).get(spec(0))["n0"][0].dtype == torch.float16


def rewritten(path: Path, change: dict[str, object], header: dict[str, str] | None = None) -> None:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    index = {**json.loads(metadata["index"]), **change}
    save_file(load_file(path), path, {**metadata, "index": json.dumps(index), **(header or {})})


@pytest.mark.parametrize(
    ("change", "header", "message"),
    [
        ({"blocks": [[0, 3, "float32"]]}, {}, "more statistics than blocks"),
        ({"blocks": [[0, 300, "float32"]]}, {}, "outside the statistics"),
        ({"blocks": [[0, 3, "int8"]]}, {}, "int8"),
        ({"rows": [{"spec": spec(0).to_json(), "blocks": [-1]}]}, {}, "a block that is not there"),
        ({"names": []}, {}, "a field is missing or of the wrong kind: IndexError"),
        ({}, {"schema": "3"}, "schema 3, this version reads 2"),
    ],
)
def test_indices_that_contradict_the_statistics_are_refused(
    tmp_path: Path, change: dict[str, object], header: dict[str, str], message: str
) -> None:
    path = tmp_path / "norms.safetensors"
    table(*ROWS).save(path)
    rewritten(path, change, header)
    with pytest.raises(FileFormatError, match=message):
        NormTable.load(path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda mean, var: (mean * float("nan"), var), "are not finite"),
        (lambda mean, var: (mean, var / 0.0), "are not finite"),
        (lambda mean, var: (mean, -var - 1e-6), "have a negative variance"),
        (lambda mean, var: (mean.int(), var.int()), r"are torch\.int32, not floating-point numbers"),
        (lambda mean, var: (mean.bool(), var.bool()), r"are torch\.bool, not floating-point numbers"),
    ],
)
def test_statistics_that_no_batch_norm_can_have_are_refused(
    damage: Callable[[torch.Tensor, torch.Tensor], Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "norms.safetensors"
    whole = {name: damage(*pair) if name == "n1" else pair for name, pair in ROWS[1].items()}
    if "not floating-point" in words:
        whole = {"n1": whole["n1"]}
    table(ROWS[0], whole).save(path)
    with pytest.raises(FileFormatError, match=f"the statistics of a=1 {words}; calibrate and save again"):
        NormTable.load(path)


def test_files_share_the_equal_beginnings_of_subnets_also_over_two_calibrations(
    digits: Supernet, tmp_path: Path
) -> None:
    generator, path = torch.Generator().manual_seed(0), tmp_path / "norms.safetensors"
    batches = [torch.randn(6, 1, 16, 16, generator=generator)]
    specs = [digits.space.sample(seed) for seed in range(12)]
    for some in (specs[:5], specs[5:]):
        subnetact.calibrate(digits, some, batches, progress=False)
    digits.norms.save(path)
    separate = sum(bytes_in(path).values())
    subnetact.calibrate(digits, specs, batches, progress=False)
    digits.norms.save(path)
    assert sum(bytes_in(path).values()) == separate
    assert separate < 0.9 * digits.norms.nbytes()
    moved = digits.norms.to_like(torch.zeros((), dtype=torch.float64))
    assert moved.nbytes() == 2 * digits.norms.nbytes()
