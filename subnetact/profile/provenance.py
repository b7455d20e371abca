"""What a table was made with and beside: the build, versions, the load of the machine, hashes of files."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from subnetact.files.documents import described
from subnetact.profile.source import RANDOM_PREFIX

ALWAYS, IF_LOADED = ("numpy", "scipy"), ("torchvision", "timm", "transformers")
"""Packages whose versions a stamp has: whenever they are installed, or if this process has imported them."""


def present() -> dict[str, Any]:
    """Return facts of a stamp that may differ between two measurements that are otherwise the same."""
    names = (*ALWAYS, *(name for name in IF_LOADED if name in sys.modules))
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    facts = {"versions": versions, "commit": commit(Path(__file__).parents[2]), "clock_mhz": _clock_mhz()}
    if hasattr(os, "getloadavg"):
        facts["load_average"] = [round(load, 2) for load in os.getloadavg()]
    return {name: fact for name, fact in facts.items() if fact}


def commit(folder: Path) -> str:
    """Return the commit of the checkout in a folder, or else that pip installed this package from; or ""."""
    with suppress(OSError):
        git = folder / ".git"
        if git.is_file():  # A worktree, whose own folder has HEAD and names the one that has the branches.
            git = folder / git.read_text().partition("gitdir:")[2].strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
        name = head.removeprefix("ref: ")
        for place in (git / name, shared / name):
            if place.is_file():
                return place.read_text().strip()
        packed = re.search(rf"^(\w+) {re.escape(name)}$", (shared / "packed-refs").read_text(), re.MULTILINE)
        return packed[1] if packed else ""
    with suppress(PackageNotFoundError, ValueError):
        url = json.loads(distribution("subnetact").read_text("direct_url.json") or "{}")
        return str(url.get("vcs_info", {}).get("commit_id", ""))
    return ""


def files_in(values: Iterable[str | None]) -> dict[str, Any]:
    """Return size and SHA-256 of the files that values name: paths, or modules, as in `pkg.mod:function`."""
    found = {}
    for value in (value for value in values if value and not value.startswith(RANDOM_PREFIX)):
        module = sys.modules.get(value.partition(":")[0]) if ":" in value else None
        path = Path(value if module is None else getattr(module, "__file__", None) or "")
        if path.is_file():
            found[value] = described(path)
    return found


def _clock_mhz() -> float:
    """Return the clock of the fastest processor now, MHz; 0 if the machine does not say."""
    with suppress(OSError, ValueError):
        clocks = re.findall(r"^cpu MHz\s*: ([\d.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return round(max(map(float, clocks), default=0.0), 1)
    return 0.0
