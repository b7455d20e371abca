"""Progress bars are shown on terminals only, so that log files hold none."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ofa_adapters
import subnetact
from subnetact import Engine, Supernet
from subnetact.export import to_torchscript

IMAGES = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def bars() -> list[tuple[str, ast.Call]]:
    """Return every call of tqdm in the packages, with its place."""
    found = []
    for package in (subnetact, ofa_adapters):
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tqdm", "trange", "tqdm.tqdm"):
                    found.append((f"{path.relative_to(folder.parent)}:{node.lineno}", node))
    return found


def test_every_bar_asks_for_a_terminal() -> None:
    found = bars()
    assert len(found) > 5
    for place, call in found:
        disable = [ast.unparse(k.value) for k in call.keywords if k.arg == "disable"]
        lines = ["not progress"] if "training/progress_bar.py" in place else []  # It prints lines there.
        quiet = [text.replace("self.", "") for text in disable]
        assert quiet in (["not progress or None"], ["None"], lines), f"{place}: a bar in log files"


def engine(digits: Supernet) -> Engine:
    spec = digits.space.smallest()
    return Engine(digits, [spec], example=IMAGES[:1], accuracy=[60.0], allow_uncalibrated=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "work",
    [
        lambda digits, path: subnetact.calibrate(digits, [digits.space.smallest()], [IMAGES]),
        lambda digits, path: subnetact.profile_latency(engine(digits), [1], warmup_ms=0, min_time_ms=1),
        lambda digits, path: subnetact.evaluate(
            digits, [digits.space.smallest()], [(IMAGES, torch.zeros(4, dtype=torch.long))]
        ),
        lambda digits, path: subnetact.search(
            digits, lambda spec: 60.0, lambda spec: 1.0, method="random", evaluations=4
        ),
        lambda digits, path: to_torchscript(engine(digits), path / "m.pt"),
    ],
    ids=["calibrate", "profile_latency", "evaluate", "search", "to_torchscript"],
)
def test_nothing_is_written_to_a_log_file(
    digits: Supernet, tmp_path: Path, work: Callable[[Supernet, Path], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    work(digits, tmp_path)
    assert capfd.readouterr() == ("", "")
