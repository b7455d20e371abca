"""Subnets against what a user of one cut-out network would run: ONNX Runtime, OpenVINO, eager torch.

`pip install 'subnetact[onnxruntime,openvino]'`. Every family, its smallest and its largest subnet, at batch
sizes 1 and 8, at float32 and at int8. Ours are an engine without memory for packed weights (`zero-copy`),
with it (`fused`), and with each backend; the peers run the same subnet, extracted and exported to ONNX for
that batch size; at int8, as ONNX Runtime quantises it (`quantize_dynamic` where there are linear layers only,
else `quantize_static`; OpenVINO runs the same file). CPU times, in turns, relative to the extracted network
in eager mode. Parts, with `--only`:

    families   the comparison
    sizes      an engine without packed weights against the extracted network in both memory formats, for
               OFA-ResNet50, at batch sizes 1 to 32 and 96 to 224 pixels
    budget     ten subnets of one supernet with each backend, and the memory of the process

`ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2` stands in for a processor without AVX-512, with
`--out results/runtimes_avx2.json`: torch, and OpenVINO's convolutions and softmax, keep to AVX2 then; its
linear layers and other kernels and ONNX Runtime do not. `--report` writes the page of both.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import RESULTS, Run, options_of, read, resident_mb, run, table
from peers import import_torchvision
from torch import Tensor, nn
from tqdm import tqdm

import subnetact
from ofa_adapters import families, load
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

ROOM_MB = 4000.0
BACKENDS = ("onnxruntime", "openvino")
PRECISIONS = ("float32", "int8")
TEXT = {"dynabert"}
Runs = dict[str, Callable[[], Any]]


def batch(family: str, size: int, pixels: int = 224) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    if family in TEXT:
        return torch.randint(1, 90, (size, 128), generator=generator)
    return torch.randn(size, 3, pixels, pixels, generator=generator)


def tensor_of(output: Any) -> Tensor:
    """Return the tensor of an output."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


class OneOutput(nn.Module):
    """A network that returns a tensor, as the peers' files do."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return tensor_of(self.network(x))


def sessions(path: Path, x: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the peers, each with one thread, running a file."""
    import onnxruntime
    import openvino

    options, array = onnxruntime.SessionOptions(), x.numpy()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    yield "onnxruntime alone", lambda: session.run(None, {name: array})[0]
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.Core().compile_model(path, "CPU", settings)
    yield "openvino alone", lambda: next(iter(compiled([array]).values()))


def quantised(path: Path, x: Tensor) -> Path:
    """Return a file at int8, as ONNX Runtime makes it."""
    import onnx
    from onnxruntime import quantization

    out, model = path.with_name("int8.onnx"), onnx.load(path)
    del model.graph.value_info[:]  # Transposed weights would contradict it.
    if all(node.op_type != "Conv" for node in model.graph.node):
        quantization.quantize_dynamic(model, out, weight_type=quantization.QuantType.QInt8)
        return out
    name = model.graph.input[0].name

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rest = [{name: x.numpy()}]

        def get_next(self) -> Any:
            return self.rest.pop() if self.rest else None

    quantization.quantize_static(path, out, Reader())
    return out


def exported(network: nn.Module, x: Tensor, folder: Path) -> Path:
    path = folder / "subnet.onnx"
    torch.onnx.export(OneOutput(network).eval(), (x,), path, dynamo=True, verbose=False, external_data=False)
    return path


def cpu_ms(runs: Runs, passes: int) -> dict[str, float]:
    """Return the median CPU time in ms of every contender, in turns."""
    times = {name: list[float]() for name in runs}
    with torch.inference_mode():
        for run in [*runs.values()] * 2:
            run()
        for _ in range(passes):
            for name, run in runs.items():
                began = time.process_time()
                run()
                times[name].append((time.process_time() - began) * 1e3)
    return {name: median(taken) for name, taken in times.items()}


def engines(supernet: Supernet, spec: SubnetSpec, x: Tensor) -> dict[str, subnetact.Engine]:
    ways: dict[str, dict[str, Any]] = {"zero-copy": {"memory_budget_mb": 0}, "fused": {}}
    ways |= {name: {"backend": name} for name in BACKENDS} if spec.precision == "float32" else {}
    made = {}
    for name, options in ways.items():
        options = {"memory_budget_mb": ROOM_MB, **options}
        made[name] = subnetact.Engine(supernet, [spec], example=x[:1], **options)
    made["fused"].pin(0)
    return made


def contenders(plain: nn.Module, ours: dict[str, subnetact.Engine], x: Tensor, int8: bool) -> Runs:
    """Return what is timed, after a comparison at float32."""
    with tempfile.TemporaryDirectory() as folder:
        path = exported(plain, x, Path(folder))
        runs: Runs = dict(sessions(quantised(path, x) if int8 else path, x))
    runs |= {name: partial(engine, x, 0) for name, engine in ours.items()}
    runs["eager"] = lambda: plain(x)
    with torch.inference_mode():
        expected = tensor_of(plain(x))
        for name, run in {} if int8 else runs.items():
            output = run()
            answer = output if isinstance(output, Tensor | dict | tuple) else torch.from_numpy(output)
            torch.testing.assert_close(tensor_of(answer), expected, rtol=1e-3, atol=1e-3, msg=name)
    return runs


def by_family(args: Namespace, known: dict[str, Any]) -> dict[str, Any]:
    result = {**known}
    for family, precision in tqdm([*product(args.families, args.precisions)], "families", disable=None):
        result.pop(f"{family}, {precision}", None)  # the error of an earlier run
        supernet, int8 = load(family).eval(), precision == "int8"
        try:
            if int8:
                supernet.enable_precision("int8")
            for which in ("smallest", "largest"):
                specs = [getattr(supernet.space, which)()]
                if int8:
                    specs = [supernet.space.at_precision(specs[0], name) for name in ("float32", "int8")]
                subnetact.calibrate(supernet, specs, [batch(family, 8)], progress=False)
                plain, spec = supernet.extract(specs[0]).eval(), specs[-1]
                ours = engines(supernet, spec, batch(family, 1))
                for size in (1, 8):
                    times = cpu_ms(contenders(plain, ours, batch(family, size), int8), 9)
                    ratios = {name: round(ms / times["eager"], 3) for name, ms in times.items()}
                    key = f"{family}, {which}, {precision}, {size}"
                    result[key] = {"eager_ms": round(times["eager"], 2), **ratios}
                    print(key, result[key], flush=True)
        except Exception as error:
            result[f"{family}, {precision}"] = f"{type(error).__name__}: {str(error)[:200]}"
            print(family, precision, result[f"{family}, {precision}"], flush=True)
    return result


def by_size() -> dict[str, Any]:
    supernet, result = load("ofa_resnet50").eval(), dict[str, Any]()
    specs = {"smallest": supernet.space.smallest(), "largest": supernet.space.largest()}
    specs["random"] = supernet.space.sample(3, 10)[8]
    subnetact.calibrate(supernet, [*specs.values()], [batch("ofa_resnet50", 8, 96)], progress=False)
    engine = subnetact.Engine(
        supernet, [*specs.values()], example=batch("ofa_resnet50", 1, 96), memory_budget_mb=0
    )
    for subnet, (name, spec) in enumerate(specs.items()):
        plain = supernet.extract(spec).eval()
        last = supernet.extract(spec).eval()
        last.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for pixels in (96, 128, 160, 224):
            for size in (1, 2, 4, 8, 16, 32):
                x = batch("ofa_resnet50", size, pixels)
                y = x.contiguous(memory_format=torch.channels_last)
                runs: Runs = {
                    "zero-copy": partial(engine, x, subnet),
                    "extracted": partial(plain, x),
                    "channels_last": partial(last, y),
                }
                times = cpu_ms(runs, 5 if size * pixels < 2000 else 3)
                ours = times.pop("zero-copy")
                row = {key: round(ours / ms, 3) for key, ms in times.items()}
                result[f"{name}, {pixels}, {size}"] = {"ms": round(ours, 1), **row}
                print(name, pixels, size, row, flush=True)
    return result


def by_budget() -> dict[str, Any]:
    supernet, result = load("ofa_mbv3").eval(), dict[str, Any]()
    specs = supernet.space.sample(0, 10)
    x = batch("ofa_mbv3", 1)
    subnetact.calibrate(supernet, specs, [batch("ofa_mbv3", 8)], progress=False)
    for backend in BACKENDS:
        before, began = resident_mb(), time.perf_counter()
        engine = subnetact.Engine(supernet, specs, example=x, backend=backend, memory_budget_mb=400)
        engine.prepare([1])
        facts: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 1)}
        facts["programs"] = sum(engine.mode_of(i) == backend for i in engine.ids)
        facts["program_mb"] = round(engine.stats().fused_bytes / 2**20, 1)
        facts["resident_mb"] = round(resident_mb() - before, 1)
        rows = []
        for subnet, spec in enumerate(specs):
            with tempfile.TemporaryDirectory() as folder:
                peers = dict(sessions(exported(supernet.extract(spec), x, Path(folder)), x))
            runs: Runs = {"ours": partial(engine, x, subnet), "alone": peers[f"{backend} alone"]}
            times = cpu_ms(runs, 41)
            rows.append(round(times["ours"] / times["alone"], 3))
        result[backend] = {**facts, "ours over alone": rows, "median": median(rows)}
        print(backend, result[backend], flush=True)
    return result


def compared(known: dict[str, Any]) -> list[str]:
    """Return the table of the families, and how much longer ours takes than the faster of the runtimes."""
    names = ("zero-copy", "fused", *BACKENDS, *(f"{name} alone" for name in BACKENDS))
    rows, times = list[list[Any]](), dict[tuple[str, str], list[float]]()
    order = [*families(), "machine"]
    for key, row in sorted(known["families"].items(), key=lambda item: order.index(item[0].split(", ")[0])):
        if isinstance(row, dict) and key != "machine":
            family, _, precision, _ = key.split(", ")
            over = row["fused"] / min(row[f"{name} alone"] for name in BACKENDS)
            times.setdefault((family, precision), []).append(over)
            cells = (f"{row[name]:.2f}" if name in row else "" for name in names)
            rows.append([key, row["eager_ms"], *cells, f"{over:.2f}"])
    head = ["subnet, precision, batch size", "eager, ms", *names, "fused over the faster one"]
    spans = [
        [family, *(_span(times.get((family, precision), [])) for precision in PRECISIONS)]
        for family in dict.fromkeys(family for family, _ in times)
    ]
    spread = table(["fused over the faster one", *PRECISIONS], spans)
    return [machine_of(known["families"]), "", *spread, "", *table(head, rows)]


def _span(numbers: list[float]) -> str:
    return f"{min(numbers):.2f} to {max(numbers):.2f}" if numbers else ""


def machine_of(part: dict[str, Any]) -> str:
    facts = part["machine"]
    return f"{facts['device_name']}, {facts['processor']} ({facts['instructions']}), torch {facts['torch']}:"


def report(known: dict[str, Any]) -> list[str]:
    """Return the tables of the page."""
    lines = list[str]()
    if "families" in known:
        lines += compared(known)
    if "families" in (limited := read(RESULTS / "runtimes_avx2.json")):
        lines += ["", "The same limited to AVX2, as far as that goes (see below):", "", *compared(limited)]
    if "sizes" in known:
        batches, rows = (1, 2, 4, 8, 16, 32), []
        for name, pixels in product(("smallest", "random", "largest"), (96, 128, 160, 224)):
            of = [known["sizes"][f"{name}, {pixels}, {size}"] for size in batches]
            cells = [f"{row['extracted']:.2f} / {row['channels_last']:.2f}" for row in of]
            rows.append([f"{name}, {pixels} px", *cells])
        head = ["zero-copy over extracted / channels_last", *map(str, batches)]
        lines += ["", machine_of(known["sizes"]), "", *table(head, rows)]
    if "budget" in known:
        facts = {"seconds": "made in, s", "programs": "programs", "program_mb": "their MiB"}
        facts["resident_mb"] = "resident, MiB more"
        rows = []
        for name in BACKENDS:
            row = known["budget"][name]
            ours = row["ours over alone"]
            spread = f"{row['median']:.2f} ({min(ours):.2f} to {max(ours):.2f})"
            rows.append([name, *(row[key] for key in facts), spread])
        head = ["ten subnets of OFA-MobileNetV3", *facts.values(), "time over the peer alone"]
        lines += ["", machine_of(known["budget"]), "", *table(head, rows)]
    return lines


def main() -> None:
    parts: dict[str, Callable[[Run], Any]] = {
        "families": lambda this: by_family(this.args, this.known.get("families", {})),
        "sizes": lambda _: by_size(),
        "budget": lambda _: by_budget(),
    }
    parser = options_of(__doc__, "runtimes", parts)
    parser.add_argument("--families", nargs="+", default=families(), help="default: all")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    import_torchvision()
    warnings.simplefilter("ignore")
    run(parser, "runtimes", parts, report)


if __name__ == "__main__":
    main()
