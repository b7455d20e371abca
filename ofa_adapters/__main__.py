"""Command line: the families known here, and which of them a checkpoint is.

python -m ofa_adapters
python -m ofa_adapters inspect FILE
"""

from __future__ import annotations

import argparse
import sys

import torch

from ofa_adapters.checkpoint import match, read
from ofa_adapters.registry import families, family_of, identify
from subnetact.errors import CheckpointError
from subnetact.space import SubnetSpace


def list_families() -> None:
    """Print every family with its axes, sizes and expected checkpoints."""
    for name in families():
        family = family_of(name)
        with torch.device("meta"):
            network, space, _ = family.build()
        parameters = sum(p.numel() for p in network.parameters())
        print(f"{name}: {parameters:,} parameters, {space.size():.3g} subnets")
        print(f"  source       {family.source} ({family.licence})")
        for line in _axes(space):
            print(f"  axis         {line}")
        if family.image_sizes:
            print(f"  image sizes  {', '.join(map(str, family.image_sizes))}")
        print(f"  calibration  {family.calibration if _has_norms(network) else 'none needed'}")
        if family.encodings:
            print(f"  encodings    {', '.join(family.encodings)}")
        print(f"  checkpoints  {', '.join(family.checkpoints)}")


def _has_norms(network: torch.nn.Module) -> bool:
    return any("running_mean" in name for name, _ in network.named_buffers())


def _axes(space: SubnetSpace) -> list[str]:
    lines = []
    for axis in space.axes:
        kinds = dict.fromkeys(slot.choices for slot in axis.slots)
        shown = " | ".join(", ".join(map(str, choices)) for choices in kinds)
        lines.append(f"{axis.name}[{len(axis.slots)}]: {shown}")
    return lines


def inspect(path: str) -> int:
    """Print which family a checkpoint is of; return the exit status, 1 where it is of none."""
    tensors = read(path)
    numbers = sum(tensor.numel() for tensor in tensors.values())
    kinds = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()}))
    print(f"{path}: {len(tensors)} tensors, {numbers:,} numbers of {kinds}")
    name = identify(tensors)
    if name is None:
        print(f"of no family known here; its first names: {', '.join(list(tensors)[:5])}")
        return 1
    family = family_of(name)
    print(f"looks like {name}, published at {family.source} ({family.licence})")
    constructor = family.infer(tensors, {}) if family.infer else {}
    try:
        with torch.device("meta"):
            network, _, _ = family.build(**constructor)
    except ValueError as error:
        print(f"load needs its constructor arguments: {error}")
        return 0
    _, wrong = match(network.state_dict(), tensors, family.rename, family.unused)
    given = ", ".join(f"{key}={value!r}" for key, value in constructor.items())
    if wrong:
        print(f"differs from the default network, so load needs its constructor arguments: {wrong}")
    else:
        print(f"fits: ofa_adapters.load({name!r}, {path!r}{', ' + given if given else ''})")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ofa_adapters", description=(__doc__ or "").splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command")
    inspecting = commands.add_parser(
        "inspect", help="say which family a checkpoint is, without running its code"
    )
    inspecting.add_argument("file")
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        list_families()
        return 0
    try:
        return inspect(arguments.file)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
