"""The table of kernels: which product each kind of machine gets, and that the products here are right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from subnetact.device import MachineFacts, machine_facts
from subnetact.errors import PrecisionError
from subnetact.operators import kernel_table
from subnetact.operators.kernel_table import _ROWS, CUBLAS, NATIVE, REFERENCE, STRIDED, kernel_for
from subnetact.profile.cli import main
from subnetact.spec import PRECISIONS

CASCADE_LAKE = frozenset({"vnni"})
COOPER_LAKE = frozenset({"vnni", "bf16"})
SAPPHIRE_RAPIDS = frozenset({"vnni", "bf16", "amx"})

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
def test_what_a_machine_has_decides_its_kernels(facts: MachineFacts, int8: str, bfloat16: str) -> None:
    for name, kernel in (("int8", int8), ("bfloat16", bfloat16)):
        row = kernel_for(name, facts)
        assert (row.precision, row.name) == (name, kernel)
        assert row.text
        assert bool(row.needs) == (not kernel), "a refusal says what would be needed"


@pytest.mark.parametrize("name", ["int8", "bfloat16"])
def test_every_row_is_some_machines(name: str) -> None:
    used = {kernel_for(name, facts) for facts, _, _ in MACHINES}
    assert used == {row for _, row in _ROWS if row.precision == name}


@pytest.mark.parametrize(("facts", "int8", "bfloat16"), MACHINES, ids=str)
def test_refusals_name_the_machine_what_it_needs_and_what_it_runs(
    facts: MachineFacts, int8: str, bfloat16: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_table, "machine_facts", lambda device: facts)
    monkeypatch.setattr(kernel_table, "_wrong", lambda name, facts: None)
    device = torch.device("cpu")
    for name, kernel in (("int8", int8), ("bfloat16", bfloat16)):
        if kernel:
            assert kernel_table.why_not(name, device) is None
            kernel_table.require_precision(name, device)
            continue
        with pytest.raises(PrecisionError) as refused:
            kernel_table.require_precision(name, device)
        message = str(refused.value)
        assert message.startswith(f"precision {name}: this is a machine ({facts}) on which ")
        assert kernel_for(name, facts).needs in message
        runs = [one for one in PRECISIONS if kernel_table.why_not(one, device) is None]
        assert f"here runs {', '.join(runs)}; " in message


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(PrecisionError, match="precision int4: no such precision is known"):
        kernel_table.require_precision("int4", torch.device("cpu"))


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
                kernel_table.require_precision(name, torch.device("cpu"))
        if not why:
            kernel_table.require_precision("int8", torch.device("cpu"))
    finally:
        kernel_table._wrong.cache_clear()


@pytest.mark.parametrize(
    ("set_to", "found"),
    [
        ({}, ""),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "AVX2"),
        ({"DNNL_MAX_CPU_ISA": "AVX", "ONEDNN_MAX_CPU_ISA": ""}, "AVX"),
    ],
)
def test_facts_are_read_with_the_limits_of_the_environment(
    set_to: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    facts = read_facts()
    assert facts.limit == found
    assert facts.aten == torch.backends.cpu.get_cpu_capability()
    assert ("vnni" in facts.units) == torch.cpu._is_vnni_supported()
    assert not (found and facts.uses("vnni"))


def read_facts(device: str = "cpu") -> MachineFacts:
    """Read the facts of this machine, past the fixture that replaces those that refuse int8."""
    return REAL.__wrapped__(device)


REAL: Any = machine_facts
"""The function of the module, taken before the first fixture runs."""


def sizes() -> list[tuple[int, int, int]]:
    return [(1, 64, 32), (3, 30, 17), (4, 96, 40), (5, 33, 7), (40, 256, 64), (200, 7, 1)]


def product_here(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a product if this machine has it for its own."""
    if name == CUBLAS and not (torch.cuda.is_available() and kernel_for("int8", read_facts("cuda")).name):
        pytest.skip("there is no CUDA device")
    if name == STRIDED and kernel_for("int8", read_facts()).name != STRIDED:
        pytest.skip("this CPU has no VNNI")
    return kernel_table._PRODUCTS[name]


@pytest.mark.parametrize("name", [STRIDED, CUBLAS])
def test_products_of_this_machine_equal_the_reference(name: str) -> None:
    multiply = product_here(name)
    device = "cuda" if name == CUBLAS else "cpu"
    for rows, features, out in sizes():
        short, full = (torch.randint(-127, 128, (n, features + 9)).to(torch.int8) for n in (rows, out + 3))
        short[0], full[0] = 127, -127
        x, weight = short[:, :features].contiguous(), full[:out, :features]
        expected = x.long() @ weight.long().t()
        assert torch.equal(kernel_table._reference(x, weight).long(), expected)
        assert torch.equal(multiply(x.to(device), weight.to(device)).cpu().long(), expected)


def test_strided_products_have_the_shapes_and_numbers_of_the_reference() -> None:
    """`torch._int_mm` is right on every CPU where it has its own loops; its speed is not asked here."""
    for rows, features, out in sizes():
        x, full = (torch.randint(-7, 8, (n, features + 9)).to(torch.int8) for n in (rows, out + 3))
        x, weight = x[:, :features].contiguous(), full[:out, :features]
        found = kernel_table._strided(x, weight)
        assert found.is_contiguous()
        assert torch.equal(found.long(), x.long() @ weight.long().t())


@pytest.mark.parametrize(("rows", "features", "out"), sizes())
def test_sizes_are_padded_for_cublas(rows: int, features: int, out: int) -> None:
    short, weight = (torch.randint(-127, 128, (n, features)).to(torch.int8) for n in (rows, out))
    x, w = kernel_table.padded_to_eights(short, weight)
    assert len(x) > 16
    assert x.shape[1] == w.shape[1]
    assert x.shape[1] % 8 == len(w) % 8 == 0
    product = x.long() @ w.long().t()
    assert torch.equal(product[:rows, :out], short.long() @ weight.long().t())
    assert not product[rows:].any()
    assert not product[:, out:].any()


def test_sizes_that_fit_are_not_copied() -> None:
    short, weight = torch.zeros(24, 64, dtype=torch.int8), torch.zeros(32, 64, dtype=torch.int8)
    x, w = kernel_table.padded_to_eights(short, weight)
    assert (x.data_ptr(), w.data_ptr()) == (short.data_ptr(), weight.data_ptr())


@pytest.mark.parametrize(("facts", "int8", "bfloat16"), MACHINES[:20:3], ids=str)
def test_the_command_prints_what_the_machine_gets(
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
        assert line.startswith(f"{name}: {row.text}" if kernel else f"{name}: refused, this is a machine")
        assert row.needs in line


def test_the_command_runs() -> None:
    command = [sys.executable, "-m", "subnetact.profile", "--machine", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 threads" in done.stdout
    assert main([*command[3:], "--threads", "0"]) == 2
