"""One name for one thing: former names do not come back.

The glossary in `subnetact/__init__.py` defines the words to use instead. The change log tells old from new,
and readers of old files know the former names of fields.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORMER = {
    r"(?<!one-)\bhot\b|\bhot_|(?<!one)_hot\b": "fused",
    r"\b[Hh]eater\b|\b[Hh]eating\b": "promotion",
    r"\b(de)?speciali[sz]ed?\b": "fused",
    r"\binterference\b|\bcontended|_beside_\d|\bcolocat|\bpressure\b": "co-runners",
    r"\bhopeless\b|\bgive[sn]? up\b|\bshed\b|\bmay_shed\b": "expired, dropped or deferred",
    r"\bslice cache\b|\bSliceCache\b|\bslice_cache\b|\bpacked slices\b": "deleted",
    r"\bSubject\b|\bload_subject\b": "ProfileSource",
    r"\bReadings\b": "Measurements",
    r"\bRoster\b|\broster\b": "WorkerStates",
    r"\bLedger\b|\bledger\b": "Outcomes",
    r"\bWaiting\b": "PendingRequests",
    r"\bMarket\b|\bmarket\b": "HullTable",
    r"\blonely\b|\bloneliest\b": "crowding_distance",
    r"\bdoubt\b": "loo_rmse",
    r"\b_reach\b": "length_scales",
    r"\bBOLD\b": "EXPLORATION",
    r"\btelling\b": "training_set",
    r"\.moves\b|\b_moves\b": "weights_generation",
    r"\b[Ss]hells?\b": "view_module",
    r"\bquicken_": "use_fast_convs_",
    r"\bSetting\b": "ElasticAttribute",
    r"\bAlternatives\b": "SwitchableModule",
    r"\bSwitch\b": "ModuleSwitch",
    r"\bListedNorm\b|\bListedBatchNorm2d\b": "PerWidthNorm",
    r"(?<!Layer)\bNormSlice\b": "LayerNormSlice",
    r"\bCollectingNorm\b": "CalibrationNorm",
}
"""What a line must not hold -> what to say instead."""
MAY_KNOW = {
    "CHANGELOG.md": "tells old from new",
    "subnetact/latency/file.py": "reads tables with the former names of fields",
    "subnetact/serving/live/batcher.py": "accepts the former name of `expired`",
    "subnetact/serving/scheduling/checks.py": "accepts the former name of `expired`",
    "subnetact/serving/simulation/replay.py": "reads logs with the former name of a field",
    "subnetact/serving/simulation/simulator.py": "accepts the former name of `expired`",
    "tests/latency/test_latency_table.py": "reads tables with the former names of fields",
    "tests/serving/test_batcher.py": "uses the former name of `expired`",
    "tests/serving/test_observability.py": "reads logs with the former name of a field",
    "tests/serving/test_simulator.py": "uses the former name of `expired`",
    "tests/test_words.py": "this list",
}
"""Files that know former names, and why."""
SUFFIXES = (".py", ".md", ".sh", ".cfg", ".toml", ".cpp")


def lines() -> list[tuple[str, int, str]]:
    """Return (file, number, line) for every line of prose and code that is tracked."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [
        (name, number, line)
        for name in listed.stdout.split()
        if name.endswith(SUFFIXES) and name not in MAY_KNOW
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
    ]


@pytest.mark.parametrize("former", FORMER)
def test_former_names_are_gone(former: str) -> None:
    found = [f"{name}:{number}: {line.strip()}" for name, number, line in lines() if re.search(former, line)]
    assert not found, f"say {FORMER[former]} instead"
