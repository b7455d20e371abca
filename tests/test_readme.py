"""The README does what it says: its Python runs as it stands."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import subnetact

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
(SERVICE,) = (block for block in BLOCKS if "Batcher(" in block and "load_digits_supernet" in block)
ORDINARY, OWN, EXPORT = (
    re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto" / page).read_text(), re.DOTALL)[0]
    for page in ("ordinary_model.md", "own_network.md", "cpp.md")
)


@pytest.fixture(autouse=True)
def quick_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure latencies shortly: what the blocks show does not depend on how precise they are."""
    quick = {"warmup_ms": 0.0, "min_time_ms": 5.0, "windows": 1, "max_windows": 1}
    monkeypatch.setattr(subnetact, "profile_latency", partial(subnetact.profile_latency, **quick))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
@pytest.mark.parametrize("number", [i for i, block in enumerate(BLOCKS) if block != SERVICE])
def test_every_block_of_python_runs_as_it_stands(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profiling").symlink_to(ROOT / "profiling")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[number], f"README.md, block {number}", "exec"), names)
    if number == 0:
        table = names["table"]
        assert len(set(table.modes)) == 1  # or else its front is that of a mixture
        for size, ms in zip(table.batch_sizes, table.latency_ms.T, strict=True):
            worse = [
                any(ms[j] <= ms[i] and table.accuracy[j] > table.accuracy[i] for j in (0, 1)) for i in (0, 1)
            ]
            assert sorted(table.front(size)) == [i for i in (0, 1) if not worse[i]]
        assert re.fullmatch(r"[01] [0-9.]+ [0-9.]+ (True|False)\n", capsys.readouterr().out)


def names_after(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    return names


@pytest.mark.slow
def test_the_service_reaches_the_accuracy_that_its_block_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where its bundle is written
    (listed,) = re.findall(r"accuracy=\[([\d., ]+)\]", SERVICE)
    stated = [float(number) for number in listed.split(",")]
    names = names_after(SERVICE)
    supernet, specs, held_out = (names[name] for name in ("supernet", "specs", "held_out"))
    measured = subnetact.evaluate(supernet, specs, [held_out], progress=False)
    assert measured == pytest.approx(stated, abs=1.0)
    engine = names["engine"]
    served = [
        100 * float((engine(held_out.images, i).argmax(1) == held_out.labels).float().mean())
        for i in range(2)
    ]
    assert served == pytest.approx(stated, abs=1.0)


def test_the_readme_is_short_and_each_command_section_has_one_shell_block() -> None:
    assert len(BLOCKS) == 5
    assert len(README.encode()) <= 10_000
    assert len(README.splitlines()) <= 150
    for block in BLOCKS[1:]:
        assert len([line for line in block.splitlines() if line.strip()]) <= 10
    for title in ("Run it", "Test it"):
        section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
        assert section is not None
        assert section.group(1).count("```") == 2


def test_the_index_of_the_benchmarks_leads_to_every_script_and_every_result() -> None:
    """A result begins with the name of a file that the index links."""
    folder = ROOT / "benchmarks"
    index = (folder / "README.md").read_text()
    assert len(index.encode()) <= 5000
    scripts = [path.name for path in folder.glob("*.py") if "__main__" in path.read_text()]
    scripts += [path.parent.name for path in folder.rglob("__main__.py")]
    helpers = {"cluster_server.py", "litserve_server.py"}  # Their scripts start them.
    assert [name for name in scripts if name not in index and name not in helpers] == []
    links = re.findall(r"\]\(([^)]+)\)", index)
    assert [link for link in links if not (folder / link).exists()] == []
    known = tuple(Path(link).stem for link in links)
    results = [path for path in (folder / "results").rglob("*.*") if path.is_file()]
    assert [path.name for path in results if not path.name.startswith(known)] == []


def test_every_trial_says_what_was_measured_and_how() -> None:
    trials = json.loads((ROOT / "benchmarks" / "results" / "trials.json").read_text())
    assert len(trials) >= 7
    for name, trial in trials.items():
        gone = set(trial) == {"question", "decision", "commit"}  # What was measured is no longer in the code.
        measured = () if gone else ("rule", "what", "command", "machine")
        for fact in ("question", "decision", "commit", *measured):
            assert trial.get(fact), f"{name} has no {fact}"
        for script in re.findall(r"(?:benchmarks|tests)/\S+\.py", trial.get("command", "")):
            assert (ROOT / script).exists(), f"{name} was measured by {script}"
