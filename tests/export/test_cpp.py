"""The C++ examples, built and run: every subnet equals Python's output, from several threads too."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_networks import plain_engine

from subnetact import Engine, LatencyTable
from subnetact.export import to_torchscript

SOURCE = Path(__file__).parents[2] / "examples" / "cpp"
MISSING = [tool for tool in ("g++", "cmake", "ninja") if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}; apt-get install g++ cmake ninja-build"
    ),
    pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning"),
]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("cpp")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    # Without optimisation the driver builds faster; the run time is spent in libtorch.
    options = ["-G", "Ninja", prefix, "-DCMAKE_CXX_FLAGS_RELEASE=-O0"]
    for command in (["cmake", "-S", SOURCE, "-B", build, *options], ["cmake", "--build", build]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return build


def run(program: Path, folder: Path, model: str = "model.pt") -> subprocess.CompletedProcess[str]:
    command = [str(program), str(folder / model), str(folder / "cases.pt"), "8", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("name", ["ofa_resnet50", "dynabert"])
def test_cpp_equals_python(name: str, family: Any, inputs_of: Any, programs: Path, tmp_path: Path) -> None:
    actuate, supernet, inputs = programs / "actuate", family(name), inputs_of(name)
    specs = supernet.space.sample(0, 5)
    ms = [[1.0 + i, 2.0 + 2 * i] for i in range(len(specs))]
    accuracy = [50.0 + i for i in range(len(specs))]
    table = LatencyTable([s.key for s in specs], accuracy, [1, 8], ms)
    scripted: Any = to_torchscript(
        plain_engine(supernet, specs, inputs), tmp_path / "model.pt", table=table, slo_ms=36
    )
    with torch.no_grad():
        outputs = [supernet.subnet(spec)(**inputs) for spec in specs]
    torch.save({"inputs": list(inputs.values()), "outputs": outputs}, tmp_path / "cases.pt")
    done = run(actuate, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"subnets {len(specs)} wrong 0" in done.stdout
    assert "threads 8 wrong 0" in done.stdout
    chosen = re.findall(r"choose slack ([\d.]+) queued 8 -> subnet (\d+) batch (\d+)", done.stdout)
    assert [(int(i), int(b)) for _, i, b in chosen] == [scripted.choose(float(s), 8) for s, _, _ in chosen]
    assert len(chosen) == 4
    assert re.search(r"actuate_us [\d.]+\nforward_us [\d.]+ switch_us -?[\d.]+ ", done.stdout)

    torch.save({"inputs": list(inputs.values()), "outputs": [o + 1 for o in outputs]}, tmp_path / "cases.pt")
    done = run(actuate, tmp_path)
    assert done.returncode == 1
    assert f"subnets {len(specs)} wrong {len(specs)}" in done.stdout
    (tmp_path / "model.pt").write_bytes(b"nothing")
    assert run(actuate, tmp_path).returncode == 2


def test_cpp_meets_deadlines(digits: Any, programs: Path, tmp_path: Path) -> None:
    """Every request has one outcome, and its answer is that of a subnet which is accurate enough."""
    specs = [digits.space.smallest(), digits.space.sample(3), digits.space.largest()]
    x = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    engine = Engine(digits, specs, example=x, accuracy=[60, 70, 80], allow_uncalibrated=True)
    to_torchscript(engine, tmp_path / "model.pt", slo_ms=50, batch_sizes=[1, 4], progress=False)
    with torch.no_grad():
        outputs = [digits.subnet(spec)(x) for spec in specs]
    count = 60
    cases = {
        "inputs": [x],
        "outputs": outputs,
        "arrivals_ms": torch.linspace(0, 90, count, dtype=torch.float64),
        # Two have too little time for any subnet, and the last one has all the time that the others may take.
        "slo_ms": torch.tensor([1e-6] * 2 + [50.0] * (count - 3) + [1e6], dtype=torch.float64),
        "min_accuracy": torch.tensor([0.0] * (count - 1) + [75.0], dtype=torch.float64),
    }
    torch.save(cases, tmp_path / "cases.pt")
    command = [str(programs / "deadlines"), *(str(tmp_path / n) for n in ("model.pt", "cases.pt", "out.csv"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["request"]) for row in rows] == list(range(count))
    outcomes = [row["outcome"] for row in rows]
    assert outcomes[:2] == ["refused", "refused"]
    assert (rows[-1]["outcome"], rows[-1]["subnet"]) == ("met", "2")
    assert {row["subnet"] for row in rows if row["outcome"] == "refused"} <= {"-1"}
    counted = f"requests {count} met {outcomes.count('met')} refused {outcomes.count('refused')} "
    assert counted in done.stdout
    assert " wrong 0 " in done.stdout
    cases["outputs"] = [output + 1 for output in outputs]
    torch.save(cases, tmp_path / "cases.pt")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r" wrong [1-9]", done.stdout)
    to_torchscript(engine, tmp_path / "model.pt", progress=False)
    assert "exported without latencies" in subprocess.run(command, capture_output=True, text=True).stderr


def test_cpp_runs_a_pt2(compiled: tuple[Engine, Path], programs: Path, tmp_path: Path) -> None:
    engine, path = compiled
    shutil.copy(path, tmp_path / "model.pt2")
    x = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(3))
    batches = [x[:1], x[:2], x, x.transpose(2, 3), x[::2], x[..., ::2].repeat_interleave(2, 3)]
    with torch.no_grad():
        outputs = [[engine.supernet.subnet(spec)(batch) for batch in batches] for spec in engine.specs]
    other_sizes = [x[:, :, :8], x[..., :15], x[..., :1], x.repeat(1, 1, 2, 2), x.repeat(1, 3, 1, 1), x[:, :0]]
    other_dtypes = [x.double(), x.half(), x.bfloat16(), x.long(), x.byte(), x.bool(), x.to(torch.complex64)]
    other_ranks = [x[0], x[0, 0], x[0, 0, 0], x[0, 0, 0, 0], x[None]]
    refused = [[bad] for bad in (*other_sizes, *other_dtypes, *other_ranks, x[:0])] + [[], [x, x]]
    cases = {"inputs": [[batch] for batch in batches], "outputs": outputs, "refused": refused}
    torch.save(cases, tmp_path / "cases.pt")
    done = run(programs / "run_pt2", tmp_path, "model.pt2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"subnets 2 batches {len(batches)} wrong 0" in done.stdout
    assert "threads 8 wrong 0" in done.stdout
    assert f"bad inputs {len(refused) + 5} answered 0" in done.stdout
    assert done.stdout.count("is no input: float32 batch:1:1073741824 1 16 16") == len(refused) - 2 + 3
    assert "no subnet 2; this file has 0..1" in done.stdout
    cases["outputs"] = [[output + 1 for output in own] for own in outputs]
    torch.save(cases, tmp_path / "cases.pt")
    assert run(programs / "run_pt2", tmp_path, "model.pt2").returncode == 1
    (tmp_path / "model.pt2").write_bytes(b"nothing")
    assert run(programs / "run_pt2", tmp_path, "model.pt2").returncode == 2
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "model.pt2", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b'"torch": "', b'"torch": "9'))
    done = run(programs / "run_pt2", tmp_path, "model.pt2")
    assert (done.returncode, "torch 9" in done.stderr) == (2, True)
