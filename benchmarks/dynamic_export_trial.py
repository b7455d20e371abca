"""Tries one dynamic `torch.export` program for all subnets: widths as symbolic ints, depth by `torch.cond`.

    python benchmarks/dynamic_export_trial.py [--families digits ofa_resnet50]
        [--compile digits] [--out benchmarks/results/dynamic_export_trial.json]

The program is traced from the operators' own slicing rule. Its inputs are a batch; for each dimension with
several sizes, a tensor whose length is the size; which layers are kept; and the statistics of every
BatchNorm. Weights are padded by one input channel, because a slice of full width is contiguous and all others
are not, which torch.export turns into a guard. The program is run by torch (`export`) and compiled by
AOTInductor, once as it comes (`aoti`) and once with convolutions called instead of lowered (`aoti_called`):
torch 2.13 lowers a convolution with `guard_int_seq(weight.get_size())` (torch/_inductor/kernel/conv.py), and
the widths of the example become constants of the compiled program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from interleaved_passes import interleaved_ms
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import subnetact
from ofa_adapters import load
from subnetact.device import machine
from subnetact.digits import load_digits_supernet
from subnetact.export import to_torchscript
from subnetact.operators import LayerSelect, Operator, SubnetNorm, WeightSlice
from subnetact.operators.view_module import mix_in_, view_module
from subnetact.spec import SubnetSpec
from subnetact.supernet.bind import bind_module
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.trace import RecordedCall

COMPARED = 40
SECONDS = 4.0
ANY_SIZE = 8
"""The size of a layer that a subnet skips; its weights are sliced, and not used."""


class Dynamic(nn.Module):
    """All subnets of a supernet as one module.

    Args:
        supernet: the supernet, of which the module holds a copy with padded weights.
    """

    def __init__(self, supernet: Supernet) -> None:
        super().__init__()
        self.supernet = supernet
        copy = deepcopy(supernet)
        self.network = copy.network.eval().requires_grad_(False)
        self.norms = copy.norm_operators()
        self.places = {path: i for i, path in enumerate(self.norms)}
        for module in self.network.modules():
            if isinstance(module, Operator):
                module.checks = False
            if isinstance(module, WeightSlice) and "in_" in module.dims:
                weight: Any = module.weight
                padded = torch.cat([weight, torch.zeros_like(weight[:, :1])], 1)
                module._parameters["weight"] = nn.Parameter(padded, False)
        stacks = [module for module in self.network.modules() if isinstance(module, LayerSelect)]
        self.gates = {gate[0] for stack in stacks for name in stack._modules if (gate := stack.gate(name))}
        specs = supernet.space.sample(0, min(500, supernet.space.size()))
        sizes = zip(*(supernet.space.resolve(spec) for spec in specs), strict=True)
        self.sizes = [sorted(set(found)) for found in sizes]
        self.varies = [i not in self.gates and len(found) > 1 for i, found in enumerate(self.sizes)]

    def forward(
        self, x: Tensor, sizes: list[Any], keeps: Tensor, means: list[Tensor], variances: list[Tensor]
    ) -> Tensor:
        """Run the subnet with these sizes on a batch."""
        row = [size.shape[0] if isinstance(size, Tensor) else size for size in sizes]
        done: dict[int, nn.Module] = {}

        def norm(module: SubnetNorm) -> nn.Module:
            i, channels = self.places[module.path], module.channels(row)  # type: ignore[arg-type]
            mean, variance = means[i][:channels], variances[i][:channels]
            return module.bind_with(row, mean, variance, trainable=True)  # type: ignore[arg-type]

        def bound(module: nn.Module) -> nn.Module:
            if id(module) not in done:
                done[id(module)] = make(module)
            return done[id(module)]

        def make(module: nn.Module) -> nn.Module:
            def child(name: str) -> nn.Module | None:
                inner = module._modules[name]
                return None if inner is None else bound(inner)

            if not isinstance(module, LayerSelect):
                return bind_module(module, row, child, norm, trainable=True)  # type: ignore[arg-type]
            gates = {name: module.gate(name) for name in module._modules}
            return module.select(
                {name: gated(module._modules[name], child(name), gate) for name, gate in gates.items()}
            )

        def gated(original: Any, layer: nn.Module | None, gate: tuple[int, int] | None) -> nn.Module | None:
            if layer is None or gate is None:
                return layer

            def call(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
                return torch.cond(keeps[gate[0]] == gate[1], layer, torch.clone, args)

            stand_in = view_module(original)
            object.__setattr__(stand_in, "recorder", call)
            return mix_in_(stand_in, RecordedCall)

        return bound(self.network)(x)  # type: ignore[no-any-return]

    def inputs(self, spec: SubnetSpec, x: Tensor) -> tuple[Any, ...]:
        """Return the inputs of the program for one subnet and a batch."""
        row = list(self.supernet.space.resolve(spec))
        used = [size if size > 1 else ANY_SIZE for size in row]
        own = self.supernet.statistics(spec)
        sizes = [
            torch.empty(size) if varies else (0 if i in self.gates else size)
            for i, (size, varies) in enumerate(zip(used, self.varies, strict=True))
        ]
        means = [torch.zeros(norm.full("channels")) for norm in self.norms.values()]
        variances = [torch.ones_like(mean) for mean in means]
        for path, (mean, variance) in own.items():
            means[self.places[path]][: len(mean)] = mean
            variances[self.places[path]][: len(mean)] = variance
        return x, sizes, torch.tensor(row), means, variances

    def program(self, spec: SubnetSpec, x: Tensor) -> ExportedProgram:
        """Export the module with symbolic sizes and batch; `spec` gives the sizes of the example."""

        def length(dim: int) -> Any:
            return {0: Dim.DYNAMIC(min=2, max=self.sizes[dim][-1])} if self.varies[dim] else None

        sizes = [length(i) for i in range(len(self.sizes))]
        norms = [None] * len(self.norms)
        shapes = ({0: Dim.DYNAMIC}, sizes, None, norms, norms)
        return torch.export.export(self, self.inputs(spec, x), dynamic_shapes=shapes, strict=False)


@contextmanager
def convolutions_called() -> Any:
    """Let AOTInductor call ATen's convolution, which takes any size, instead of lowering it."""
    from torch._inductor import lowering

    kept = dict(lowering.lowerings)
    for key in (torch.ops.aten.convolution, torch.ops.aten.convolution.default):
        lowering.lowerings.pop(key, None)
    lowering.make_fallback(torch.ops.aten.convolution.default)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        lowering.lowerings.clear()
        lowering.lowerings.update(kept)


def compiled(program: ExportedProgram, folder: str, name: str) -> Any:
    options = {"aot_inductor.precompile_headers": False}
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=f"{folder}/{name}.pt2", inductor_configs=options
    )
    return torch._inductor.aoti_load_package(path)


def agreement(
    run: Callable[..., Any], dynamic: Dynamic, specs: list[SubnetSpec], x: Tensor
) -> dict[str, Any]:
    """Compare a program with the views of subnets: bit for bit, and by the largest relative difference."""
    equal, near, worst, refused = 0, 0, 0.0, []
    for spec in specs:
        expected = dynamic.supernet.subnet(spec)(x)
        try:
            found = run(*dynamic.inputs(spec, x))
        except Exception as error:
            refused.append(str(error).strip().splitlines()[0])
            continue
        different = float((found - expected).abs().max() / expected.abs().max())
        equal += torch.equal(found, expected)
        near += different < 1e-4
        worst = max(worst, different) if different == different else float("nan")
    return {
        "subnets": len(specs),
        "bit_equal": equal,
        "equal_within_1e-4": near,
        "largest_relative_difference": worst,
        "refused": refused[:1],
    }


def trial(supernet: Supernet, x: Tensor, folder: str, compile: bool) -> Iterator[dict[str, Any]]:
    """Yield what is known after every part of the trial."""
    space = supernet.space
    dynamic = Dynamic(supernet)
    specs = sorted(space.sample(1, COMPARED), key=lambda spec: sum(space.resolve(spec)))
    specs = list(dict.fromkeys([space.smallest(), *specs, space.largest()]))
    middle = specs[len(specs) // 2]
    found: dict[str, Any] = {"input": list(x.shape), "example": middle.key}
    start = time.perf_counter()
    try:
        program = dynamic.program(middle, x)
    except Exception as error:
        yield {**found, "export_error": str(error).strip().splitlines()[:4]}
        return
    found["export_s"] = round(time.perf_counter() - start, 1)
    found["nodes"] = len(program.graph.nodes)
    run = program.module()
    found["export"] = agreement(run, dynamic, specs, x)
    timed = [specs[0], middle, specs[-1]]
    found["export"]["ms"] = times(run, dynamic, timed, x, folder)
    yield found
    for name in ("aoti", "aoti_called") if compile else ():
        program = dynamic.program(middle, x)  # compiling leaves constants in the symbols of the former one
        start = time.perf_counter()
        try:
            if name == "aoti":
                run = compiled(program, folder, name)
            else:
                with convolutions_called():
                    run = compiled(program, folder, name)
        except Exception as error:
            found[name] = {"error": str(error).strip().splitlines()[:4]}
            continue
        seconds = round(time.perf_counter() - start, 1)
        found[name] = {"compile_s": seconds, **agreement(run, dynamic, specs, x)}
        found[name]["ms"] = times(run, dynamic, timed, x, folder)
        yield found


def times(
    run: Callable[..., Any], dynamic: Dynamic, specs: list[SubnetSpec], x: Tensor, folder: str
) -> dict[str, Any]:
    """Return the median time in ms of the program and of its contenders, which take turns."""
    engine = subnetact.Engine(
        dynamic.supernet, specs, example=x, memory_budget_mb=0, allow_uncalibrated=True, check=False
    )
    file: Any = to_torchscript(engine, f"{folder}/m.pt", progress=False)
    found = {}
    for i, spec in enumerate(specs):
        view, number = dynamic.supernet.subnet(spec), torch.tensor([i])
        traced: Any = torch.jit.trace(view, x[:1])  # type: ignore[no-untyped-call]
        frozen: Any = torch.jit.freeze(traced.eval())
        for size in (1, 8):
            batch = x[:1].expand(size, *x.shape[1:]).contiguous()
            calls: dict[str, Callable[[], Any]] = {
                "view": partial(view, batch),
                "frozen_torchscript": partial(frozen, batch),
                "torchscript_file": partial(file, batch, number),
                "program": partial(run, *dynamic.inputs(spec, batch)),
            }
            ms = interleaved_ms(calls, seconds=SECONDS, passes=25)
            found[f"{spec.key}, batch {size}"] = {
                name: round(statistics.median(each[len(each) // 5 :]), 3) for name, each in ms.items()
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--families", nargs="+", default=["digits", "ofa_resnet50"])
    parser.add_argument("--compile", nargs="+", default=["digits"], help="families for AOTInductor")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    document: dict[str, Any] = {"machine": machine(torch.device("cpu")), "threads": 1, "families": {}}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(False), torch.no_grad():
        for family in args.families:
            supernet = load_digits_supernet() if family == "digits" else load(family).eval()
            x = torch.randn(3, 1, 16, 16) if family == "digits" else torch.randn(3, 3, 96, 96)
            for found in trial(supernet, x, folder, family in args.compile):
                document["families"][family] = found
                if args.out is not None:
                    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
