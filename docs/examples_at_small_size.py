"""How sphinx-gallery runs `examples/*.py`: small, by their own options, and with their figures."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

SMALL = {
    "distil_timm_model": ["--pretraining", "30", "--steps", "20"],
    "finetune_own_model": ["--steps", "20", "--elastic-steps", "12", "--evaluations", "4"],
    "read_pages": ["--steps", "150", "--seconds", "3"],
}
"""Example -> options of a short run. The others need weights, servers or hours: they are shown only."""
PATTERN = "|".join(rf"/{name}\.py" for name in SMALL)
_OUT = Path("out")
"""Where programs write their results; they run in `docs/examples`, which nobody keeps."""


def arguments(_: dict[str, Any], script: dict[str, Any]) -> list[str]:
    """Return the options of an example."""
    name = Path(script["src_file"]).stem
    return [*SMALL[name], "--out", str(_OUT / name)]


def start(_: dict[str, Any], name: str) -> None:
    """Begin every example alike, with one thread, and without bars of progress."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    os.environ["TQDM_DISABLE"] = "1"
    shutil.rmtree(Path(__file__).parent / "examples" / _OUT / Path(name).stem, ignore_errors=True)


def figures(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Show the figures that an example has written beside its results."""
    from sphinx_gallery.scrapers import figure_rst

    del block
    program = Path(block_vars["src_file"])
    out, shown = program.parent / _OUT / program.stem, []
    paths = block_vars["image_path_iterator"]
    for figure in sorted(out.rglob("*.png")):
        target = Path(next(paths))
        figure.rename(target)
        shown.append(str(target))
    return str(figure_rst(shown, gallery_conf["src_dir"])) if shown else ""
