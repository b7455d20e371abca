"""Every statistics row owns its tensor, in memory and in the file of a norm table."""

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

from subnetact.errors import FileFormatError, ForeignSpec, SpecError
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormRow, NormTable


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


def equal(row: NormRow, expected: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> bool:
    found = row.pairs()
    return list(found) == list(expected) and all(
        torch.equal(a, b) for name in expected for a, b in zip(found[name], expected[name], strict=True)
    )


ROWS = [statistics(0, 0, 0), statistics(0, 0, 1), statistics(0, 2, 1), statistics(5, 0)]
WHOLE = 2 * 4 * (12 * 3 + 7)
"""Bytes of all rows."""


def test_rows_own_their_tensors() -> None:
    made = table(*ROWS)
    assert made.nbytes() == sum(made.get(s).nbytes for s in made) == WHOLE
    for i, expected in enumerate(ROWS):
        assert equal(made.get(spec(i)), expected)
    made.get(spec(0)).flat.mul_(2)
    assert equal(made.get(spec(0)), {n: (2 * m, 2 * v) for n, (m, v) in ROWS[0].items()})
    for i, expected in enumerate(ROWS[1:], start=1):
        assert equal(made.get(spec(i)), expected)


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


def test_the_file_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "norms.safetensors"
    made = table(*ROWS, {"n0": tuple(t.double() for t in ROWS[0]["n0"])}, {})
    same = made.get(spec(0))
    assert same is not None
    made.update({spec(6): same})
    made.save(path)
    loaded = NormTable.load(path)
    assert list(loaded) == list(made)
    assert loaded.nbytes() == made.nbytes() == WHOLE + 48 + same.nbytes
    assert loaded.get(spec(4)).flat.dtype == torch.float64
    loaded.get(spec(6)).flat.mul_(2)
    for i, expected in enumerate(ROWS):
        assert equal(loaded.get(spec(i)), expected)
    loaded.save(path)
    assert NormTable.load(path).get(spec(6)).flat.equal(2 * same.flat)
    loaded.apply(lambda t: t.half())
    loaded.save(path)
    for i, expected in enumerate(ROWS):
        assert equal(NormTable.load(path).get(spec(i)), expected)


ONE = {"spec": spec(0).to_json(), "channels": {"n0": 3, "n1": 4, "n2": 5}, "corrected": {}}


@pytest.mark.parametrize(
    ("change", "header", "message"),
    [
        ({"channels": {"n0": 300}}, {}, r"needs shape \(600,\), got \(24,\)"),
        ({"channels": {"n0": 13, "n1": -1}}, {}, "the channel counts of a statistics row must be positive"),
        ({"channels": {"n0": 12.0}}, {}, "a field is missing or of the wrong kind: TypeError"),
        ({"channels": ["n0"]}, {}, "of the wrong kind: AttributeError"),
        ({"corrected": None}, {}, "of the wrong kind: AttributeError"),
        ({}, {"schema": 2}, "schema 2, this version reads 1"),
        ({}, {"rows": [ONE] * 4}, "of the wrong kind: KeyError"),
    ],
)
def test_contradictory_rows_are_refused(
    tmp_path: Path, change: dict[str, Any], header: dict[str, Any], message: str
) -> None:
    path = tmp_path / "norms.safetensors"
    table(*ROWS[:3]).save(path)
    with safe_open(path, "pt") as file:
        document = json.loads(file.metadata()["document"])
    document |= {"rows": [{**ONE, **change}]} | header
    save_file(load_file(path), path, {"document": json.dumps(document)})
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
    damage: Callable[[torch.Tensor, torch.Tensor], Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "norms.safetensors"
    whole = {name: damage(*pair) if name == "n1" else pair for name, pair in ROWS[1].items()}
    if "not floating-point" in words:
        whole = {"n1": whole["n1"]}
    with pytest.raises(SpecError, match=f"the statistics of a=1 {words}; calibrate and save again"):
        table(ROWS[0], whole).save(path)
    assert not path.exists()
    with monkeypatch.context() as patch:
        patch.setattr("subnetact.supernet.norm_table._require_sound", lambda *_: None)
        table(ROWS[0], whole).save(path)
    with pytest.raises(FileFormatError, match=f"the statistics of a=1 {words}; calibrate and save again"):
        NormTable.load(path)


def test_rows_are_dropped_and_kept_by_specs() -> None:
    made, foreign = table(*ROWS), SubnetSpec("other", (("a", (0,)),))
    made.drop([spec(1), spec(9)])
    assert set(made) == {spec(0), spec(2), spec(3)}
    made.keep([spec(1), spec(3)])
    assert set(made) == {spec(3)}
    for change in (made.drop, made.keep):
        with pytest.raises(ForeignSpec, match="the norm table is of space s, got a subnet of other"):
            change([spec(3), foreign])
        with pytest.raises(SpecError, match=r"got SubnetSpec.*; write \[spec\]"):
            change(spec(3))
        with pytest.raises(SpecError, match=r"got \[\{.a.: 3\}"):
            change([{"a": 3}])
    assert set(made) == {spec(3)}
    made.keep([])
    assert not len(made)
