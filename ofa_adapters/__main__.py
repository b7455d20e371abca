"""Command line: lists the families, and tells which family a checkpoint has.

python -m ofa_adapters
python -m ofa_adapters inspect FILE
"""

from __future__ import annotations

import argparse

import torch

from ofa_adapters.checkpoint import read
from ofa_adapters.registry import families, family_of, fitted, language_models, recognised
from subnetact.command import reported, run_command
from subnetact.errors import CheckpointError, SpecError


def list_families() -> None:
    """Print every family with its source, axes, calibration, encodings and checkpoints."""
    for name in (*families(), *language_models()):
        family = family_of(name)
        facts = [f"source       {family.source} ({family.licence})"]
        if name in language_models():
            print(f"{name}: a language model, built by transformers (pip install 'subnetact[hf]')")
        else:
            with torch.device("meta"):
                network, space, _ = family.build()
            parameters = sum(p.numel() for p in network.parameters())
            print(f"{name}: {parameters:,} parameters, {space.size():.3g} subnets")
            for axis in space.axes:
                kinds = dict.fromkeys(slot.choices for slot in axis.slots)
                shown = " | ".join(", ".join(map(str, choices)) for choices in kinds)
                facts.append(f"axis         {axis.name}[{len(axis.slots)}]: {shown}")
            normed = any("running_mean" in name for name, _ in network.named_buffers())
            facts.append(f"calibration  {family.calibration if normed else 'none needed'}")
        if family.encodings:
            facts.append(f"encodings    {', '.join(family.encodings)}")
        for fact in (*facts, f"checkpoints  {', '.join(family.checkpoints)}"):
            print(f"  {fact}")


def inspect(path: str) -> int:
    """Print which family a checkpoint has; return 1 if it has none of the known ones, else 0."""
    tensors = read(path)
    numbers = sum(tensor.numel() for tensor in tensors.values())
    kinds = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()}))
    print(f"{path}: {len(tensors)} tensors, {numbers:,} numbers of {kinds}")
    name = recognised(tensors)
    if name is None:
        print(f"this is none of the known families; its first names are {', '.join(list(tensors)[:5])}")
        return 1
    family = family_of(name)
    if family.ordinary:
        print(f"has the names of {family.ordinary}: make it elastic with subnetact.insert_(model, example=x)")
        print(f"if it was trained as {name}, published at {family.source} ({family.licence}):")
    else:
        print(f"looks like {name}, published at {family.source} ({family.licence})")
    try:
        with torch.device("meta"):
            _, constructor, _ = fitted(name, path, tensors, {})
        needed = "".join(f", {key}={value!r}" for key, value in constructor.items())
        print(f"fits: ofa_adapters.load({name!r}, {path!r}{needed})")
    except (CheckpointError, SpecError) as error:
        print(f"load needs constructor arguments: {error}" if isinstance(error, SpecError) else error)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 1 for a checkpoint of no known family and 2 for an unreadable one."""
    parser = argparse.ArgumentParser("python -m ofa_adapters", description=(__doc__ or "").splitlines()[0])
    parser.set_defaults(run=lambda _: list_families())
    inspecting = parser.add_subparsers().add_parser(
        "inspect", help="tell which family a checkpoint has, without running code from it"
    )
    inspecting.add_argument("file")
    inspecting.set_defaults(run=lambda options: inspect(options.file))
    options = parser.parse_args(argv)
    return reported(options.run, options, "ofa_adapters")


if __name__ == "__main__":
    run_command(main)
