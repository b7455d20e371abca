"""The table of kernels: which product each kind of machine gets, and that the products here are right."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from subnetact.device import MachineFacts, machine_facts
from subnetact.errors import PrecisionError
from subnetact.operators import kernel_table
from subnetact.operators.kernel_table import _ROWS, CUBLAS, NATIVE, REFERENCE, STRIDED, kernel_for
from subnetact.profile.cli import main
from subnetact.spec import PRECISIONS

CASCADE_LAKE = frozenset({"vnni"})
COOPER_LAKE = frozenset({"vnni", "bf16"})
SAPPHIRE_RAPIDS = frozenset({"vnni", "bf16", "amx"})
CPU = torch.device("cpu")

MACHINES: list[tuple[MachineFacts, str, str]] = [
    (MachineFacts(units=CASCADE_LAKE), STRIDED, ""),
    (MachineFacts(units=COOPER_LAKE), STRIDED, NATIVE),
    (MachineFacts(units=SAPPHIRE_RAPIDS), STRIDED, NATIVE),
    (MachineFacts(units=SAPPHIRE_RAPIDS, limit="avx512_core_amx"), STRIDED, NATIVE),
    (MachineFacts(units=SAPPHIRE_RAPIDS, limit="AVX512_CORE_BF16"), STRIDED, NATIVE),
    (MachineFacts(units=SAPPHIRE_RAPIDS, limit="AVX512_CORE_VNNI"), STRIDED, ""),
    (MachineFacts(units=SAPPHIRE_RAPIDS, limit="AVX512_CORE"), "", ""),
    (MachineFacts(units=SAPPHIRE_RAPIDS, limit="AVX2"), "", ""),
    (MachineFacts(units=SAPPHIRE_RAPIDS, limit="no such limit"), STRIDED, NATIVE),
    (MachineFacts(units=SAPPHIRE_RAPIDS, aten="AVX2"), "", ""),
    (MachineFacts(units=SAPPHIRE_RAPIDS, onednn=False), "", ""),
    (MachineFacts(), "", ""),
    (MachineFacts(aten="AVX2"), "", ""),
    (MachineFacts(aten="DEFAULT"), "", ""),
    (MachineFacts(architecture="AMD64", units=CASCADE_LAKE), STRIDED, ""),
    (MachineFacts(architecture="aarch64", aten="SVE256"), "", ""),
    (MachineFacts(architecture="ppc64le", aten="DEFAULT"), "", ""),
    (MachineFacts("cuda", cuda=(9, 0)), CUBLAS, NATIVE),
    (MachineFacts("cuda", cuda=(7, 5)), CUBLAS, ""),
    (MachineFacts("cuda", cuda=(7, 0)), "", ""),
    (MachineFacts("mps", architecture="arm64"), "", ""),
    (MachineFacts(reference=True), REFERENCE, NATIVE),
]


@pytest.mark.parametrize(("facts", "int8", "bfloat16"), MACHINES, ids=str)
def test_what_a_machine_has_decides_its_kernels_and_a_refusal_says_what_it_needs(
    facts: MachineFacts,
    int8: str,
    bfloat16: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for place in ("subnetact.device", "subnetact.operators.kernel_table"):
        monkeypatch.setattr(f"{place}.machine_facts", lambda device: facts)
    monkeypatch.setattr(kernel_table, "_wrong", lambda name, facts: None)
    assert main(["--machine", "--device", "cpu"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert str(facts) in first
    assert f"{torch.get_num_threads()} threads" in first
    assert lines[0] == "float32: torch's own products"
    for line, name, kernel in zip(lines[1:], ("bfloat16", "int8"), (bfloat16, int8), strict=True):
        row = kernel_for(name, facts)
        assert (row.precision, row.name, bool(row.needs)) == (name, kernel, not kernel)
        assert row.text
        assert line.startswith(f"{name}: {row.text}" if kernel else f"{name}: refused, this is a machine")
        assert row.needs in line
        if kernel:
            kernel_table.require_precision(name, CPU)
            continue
        with pytest.raises(PrecisionError) as refused:
            kernel_table.require_precision(name, CPU)
        message = str(refused.value)
        assert message.startswith(f"precision {name}: this is a machine ({facts}) on which ")
        assert row.needs in message
        runs = [one for one in PRECISIONS if kernel_table.why_not(one, CPU) is None]
        assert f"here runs {', '.join(runs)}; " in message


def test_every_row_is_some_machines_and_other_precisions_are_refused() -> None:
    used = {kernel_for(name, facts) for facts, _, _ in MACHINES for name in ("int8", "bfloat16")}
    assert used == {row for _, row in _ROWS}
    with pytest.raises(PrecisionError, match="precision int4: no such precision is known"):
        kernel_table.require_precision("int4", CPU)


@pytest.mark.parametrize(
    ("program", "limit_s", "why"),
    [
        ("#!/bin/sh\nexit 0", 60, ""),
        ("#!/bin/sh\nkill -ILL $$", 60, "a process that tried them failed"),
        ("#!/bin/sh\nexec sleep 60", 0.05, "a process that tried them had not ended after 0.05 s"),
    ],
)
def test_announced_matrix_units_that_do_not_work_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, limit_s: float, why: str
) -> None:
    python = tmp_path / "python"
    python.write_text(program)
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(kernel_table, "TRIAL_S", limit_s)
    facts = MachineFacts(units=SAPPHIRE_RAPIDS, limit="AVX512_CORE_AMX")
    monkeypatch.setattr(kernel_table, "machine_facts", lambda device: facts)
    monkeypatch.setattr(kernel_table, "int8_product", lambda a, b: a.int() @ b.int().t())
    kernel_table._wrong.cache_clear()
    try:
        for name in ("int8", "bfloat16") if why else ():
            with pytest.raises(PrecisionError, match=f"{why}; set .* ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"):
                kernel_table.require_precision(name, CPU)
        if not why:
            kernel_table.require_precision("int8", CPU)
    finally:
        kernel_table._wrong.cache_clear()


REAL: Any = machine_facts
"""The function of the module, taken before the first fixture replaces it."""


def read_facts(device: str = "cpu") -> MachineFacts:
    """Read the facts of this machine, past the fixture that replaces those that refuse int8."""
    return REAL.__wrapped__(device)


@pytest.mark.parametrize(
    ("set_to", "found"),
    [
        ({}, ""),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "AVX2"),
        ({"DNNL_MAX_CPU_ISA": "AVX", "ONEDNN_MAX_CPU_ISA": ""}, "AVX"),
    ],
)
def test_facts_have_the_limits_of_the_environment(
    set_to: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    facts = read_facts()
    assert (facts.limit, facts.aten) == (found, torch.backends.cpu.get_cpu_capability())
    assert ("vnni" in facts.units) == torch.cpu._is_vnni_supported()
    assert not (found and facts.uses("vnni"))


SIZES = [(1, 64, 32), (3, 30, 17), (4, 96, 40), (5, 33, 7), (40, 256, 64), (200, 7, 1), (24, 64, 32)]


@pytest.mark.parametrize("name", [STRIDED, CUBLAS])
def test_products_are_those_of_whole_numbers(name: str) -> None:
    """Where sums of large products saturate, `torch._int_mm` is right on small numbers."""
    device = "cuda" if name == CUBLAS else "cpu"
    if name == CUBLAS and not (torch.cuda.is_available() and kernel_for("int8", read_facts("cuda")).name):
        pytest.skip("there is no CUDA device")
    largest = 127 if kernel_for("int8", read_facts(device)).name == name else 7
    for rows, features, out in SIZES:
        short, full = (
            torch.randint(-largest, largest + 1, (n, features + 9)).to(torch.int8) for n in (rows, out + 3)
        )
        short[0], full[0] = largest, -largest
        x, weight = short[:, :features].contiguous(), full[:out, :features]
        expected = x.long() @ weight.long().t()
        assert torch.equal(kernel_table._reference(x, weight).long(), expected)
        product = kernel_table._PRODUCTS[name](x.to(device), weight.to(device))
        assert product.is_contiguous()
        assert torch.equal(product.cpu().long(), expected)


def test_sizes_are_padded_for_cublas_and_those_that_fit_are_not_copied() -> None:
    for rows, features, out in SIZES:
        short, weight = (torch.randint(-127, 128, (n, features)).to(torch.int8) for n in (rows, out))
        x, w = kernel_table.padded_to_eights(short, weight)
        assert len(x) > 16
        assert x.shape[1] == w.shape[1]
        assert x.shape[1] % 8 == len(w) % 8 == 0
        product = x.long() @ w.long().t()
        assert torch.equal(product[:rows, :out], short.long() @ weight.long().t())
        assert not product[rows:].any()
        assert not product[:, out:].any()
    assert (x.data_ptr(), w.data_ptr()) == (short.data_ptr(), weight.data_ptr())
