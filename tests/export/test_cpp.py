"""The C++ example, built and run: every subnet equals Python's output, from eight threads too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_engines import plain_engine

import subnetact
from subnetact.export import to_torchscript

SOURCE = Path(__file__).parents[2] / "examples" / "cpp"
MISSING = [tool for tool in ("g++", "cmake", "ninja") if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}; apt-get install g++ cmake ninja-build"
    ),
    pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning"),
]


@pytest.fixture(scope="session")
def actuate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("cpp")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (
        # Without optimisation the driver builds faster; the run time is spent in libtorch.
        [
            "cmake",
            "-G",
            "Ninja",
            "-S",
            str(SOURCE),
            "-B",
            str(build),
            prefix,
            "-DCMAKE_CXX_FLAGS_RELEASE=-O0",
        ],
        ["cmake", "--build", str(build)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return build / "actuate"


def run(actuate: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(actuate), str(folder / "model.pt"), str(folder / "cases.pt"), "8", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("name", ["ofa_resnet50", "dynabert"])
def test_cpp_equals_python(name: str, family: Any, inputs_of: Any, actuate: Path, tmp_path: Path) -> None:
    supernet, inputs = family(name), inputs_of(name)
    specs = supernet.space.sample(0, 5)
    ms = [[1.0 + i, 2.0 + 2 * i] for i in range(len(specs))]
    accuracy = [50.0 + i for i in range(len(specs))]
    table = subnetact.LatencyTable([s.key for s in specs], accuracy, [1, 8], ms)
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
