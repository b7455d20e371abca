"""Whether subnets mean what they should: `python benchmarks/meaning.py [--only TEXT] [--report]`.

Inserts small models of every kind (`meaning_models.py`) and compares the smallest, the largest and random
subnets with a reference that knows nothing of the library's proof (`meaning_reference.py`): on the example
and on other batch sizes, lengths, resolutions and values; their outputs and gradients in training mode; and
the largest subnet after `reorder_` with the original model. Then it inserts them with small choices, of which
the first is one channel. A model may be refused. What was accepted and differs, or raises anything, is wrong;
then the exit status is 1. `must be refused` has models of which no subnet means anything, and examples that
show too little; accepted and right is fine there, too.

Writes `results/meaning.json`; `--report` makes the page from it.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, header, write_section
from meaning_models import CASES, Case
from meaning_reference import reference_of, relative_difference, tensors_in, used_elements
from peers import import_torchvision
from torch import Tensor, nn
from tqdm import tqdm

import subnetact
from subnetact import Supernet
from subnetact.errors import SubnetActError, first_line
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import call_with

SMALL = "small choices"
SMALL_CHOICES = [0.01, 0.3, 0.6, 1.0]
GRADIENTS = 3e-3
"""The largest difference of a gradient, relative to its largest number."""
COUNTED = ("subnets", "blind", "comparisons", "wrong", "crashes")
"""`blind` are smaller subnets whose reference equals the whole model on all inputs: nothing could be seen."""


class Comparison:
    """What was compared for one model, and what differs."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.facts: dict[str, Any] = {**dict.fromkeys(COUNTED, 0), "worst": 0.0, "worst_gradient": 0.0}
        self.faults: list[str] = []

    def add(self, what: str, difference: float | str, kind: str = "worst") -> None:
        """Count a comparison; a difference in words is wrong."""
        self.facts["comparisons"] += 1
        number = difference if isinstance(difference, float) else None
        if number is not None:
            self.facts[kind] = max(self.facts[kind], float(f"{number:.1e}"))
        if number is None or not number <= (self.tolerance if kind == "worst" else GRADIENTS):
            self.facts["wrong"] += 1
            self.faults.append(f"{what}: {difference if number is None else f'{number:.1e}'}")

    def crash(self, what: str, error: Exception) -> None:
        """Count an error that is none of the library's refusals."""
        self.facts["wrong"] += 1
        self.facts["crashes"] += 1
        self.faults.append(f"{what}: {type(error).__name__}: {first_line(error)}")


def random_model(case: Case) -> nn.Module:
    """Return a model in evaluation mode, whose weights are not all alike, without chance in training."""
    torch.manual_seed(0)
    model = case.make().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_mean"):
                tensor.normal_()
            elif name.endswith("running_var"):
                tensor.uniform_(0.5, 2.0)
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.3 * torch.randn_like(parameter))
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(module, name, 0.0)
        if isinstance(module, nn.RReLU):
            module.lower = module.upper
    return model


def run(case: Case, number: int, small: bool = False) -> dict[str, Any]:
    """Insert one model and compare `number` random subnets."""
    started = time.process_time()
    row: dict[str, Any] = {"kind": SMALL if small else case.kind, "name": case.name}
    found = Comparison(case.tolerance)
    model = random_model(case)
    original = copy.deepcopy(model)
    options = {**case.options, **({"choices": SMALL_CHOICES} if small else {})}
    try:
        supernet = subnetact.insert_(model, example=copy.deepcopy(case.inputs[0]), **options)
    except SubnetActError as error:
        return {**row, "refused": " ".join(str(error).split())[:200], "seconds": _since(started)}
    except Exception as error:
        found.crash("insert_", error)
        return {**row, **found.facts, "faults": found.faults, "seconds": _since(started)}
    row["groups"] = dict(Counter(group.axis for group in supernet.description.groups.values()))
    if supernet.description.stages:
        row["groups"]["depth"] = len(supernet.description.stages)
    space, draw = supernet.space, random.Random(0)
    specs = list(
        dict.fromkeys([space.smallest(), space.largest(), *(space.sample(draw) for _ in range(number))])
    )
    found.facts["subnets"] = len(specs)
    for spec in specs:
        compare_outputs(found, case, original, supernet, spec)
    compare_order(found, case, original, copy.deepcopy(supernet))
    if case.training and not small:
        for spec in [specs[0], *specs[2:5]]:
            compare_training(found, case, original, supernet, spec)
    facts = {**row, **found.facts, "seconds": _since(started)}
    return {**facts, "faults": found.faults[:4]} if found.faults else facts


def _since(started: float) -> float:
    return round(time.process_time() - started, 2)


def compare_outputs(
    found: Comparison, case: Case, model: nn.Module, supernet: Supernet, spec: SubnetSpec
) -> None:
    """Compare one subnet with its reference on all inputs."""
    try:
        view = supernet.subnet(spec).eval()
        reference = reference_of(model, view, used_elements(supernet, spec, view))
        blind = spec != supernet.space.largest()
        for i, x in enumerate(case.inputs):
            with torch.no_grad():
                ours = call_with(view, copy.deepcopy(x))
                with torch.overrides.BaseTorchFunctionMode():  # Then torch nests no tensors of the reference.
                    expected, whole = (call_with(network, copy.deepcopy(x)) for network in (reference, model))
            found.add(f"{spec} on input {i}", relative_difference(ours, expected))
            effect = relative_difference(expected, whole)
            blind &= isinstance(effect, float) and effect <= case.tolerance
        found.facts["blind"] += blind
    except Exception as error:
        found.crash(f"{spec}", error)


def compare_order(found: Comparison, case: Case, model: nn.Module, supernet: Supernet) -> None:
    """Compare the largest subnet after `reorder_` with the model, on all inputs."""
    try:
        order = subnetact.reorder_(supernet, "l1", example=copy.deepcopy(case.inputs[0]))
        found.facts["sorted"] = len(order.reordered)
        view = supernet.subnet(supernet.space.largest())
        for i, x in enumerate(case.inputs):
            with torch.no_grad():
                ours, expected = (call_with(network, copy.deepcopy(x)) for network in (view, model))
            found.add(f"reorder_, largest on input {i}", relative_difference(ours, expected))
    except SubnetActError as error:
        found.facts["sorted"] = f"refused: {first_line(error)}"[:100]
    except Exception as error:
        found.crash("reorder_", error)


def compare_training(
    found: Comparison, case: Case, model: nn.Module, supernet: Supernet, spec: SubnetSpec
) -> None:
    """Compare outputs and gradients of one subnet in training mode with its reference."""
    try:
        view = supernet.eval().subnet(spec)
        used = used_elements(supernet, spec, view)
        reference = reference_of(model, view, used).train()
        supernet.train().zero_grad()
        torch.manual_seed(0)
        ours = call_with(partial(supernet, subnet=spec), copy.deepcopy(case.inputs[0]))
        torch.manual_seed(0)
        expected = call_with(reference, copy.deepcopy(case.inputs[0]))
        found.add(f"{spec} in training", relative_difference(ours, expected))
        for output in (ours, expected):
            if (total := _weighted_sum(output)).requires_grad:  # Not if all are truth values.
                total.backward()  # type: ignore[no-untyped-call]
        found.add(f"gradients of {spec}", _gradient_difference(supernet, reference, used), "worst_gradient")
    except Exception as error:
        found.crash(f"{spec} in training", error)
    finally:
        supernet.eval()


def _weighted_sum(output: Any) -> Tensor:
    """Return the sum of all numbers with random weights, which are the same in every call."""
    draw, total = torch.Generator().manual_seed(0), torch.zeros(())
    for tensor in tensors_in(output):
        weights = torch.randn(tensor.shape, generator=draw)
        if tensor.requires_grad:
            real = torch.view_as_real(tensor).sum(-1) if tensor.is_complex() else tensor
            total = total + (real * weights).nan_to_num(0.0, 0.0, 0.0).sum()
    return total


def _gradient_difference(supernet: Supernet, reference: nn.Module, used: dict[str, Tensor]) -> float | str:
    ours = {name: p.grad for name, p in supernet.network.named_parameters()}
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    largest = max((float(g.abs().max()) for g in theirs.values() if g is not None), default=0.0)
    worst = 0.0
    for name, expected in theirs.items():
        gradient = ours[name]
        if gradient is not None and bool(((1 - used[name]) * gradient).any()):
            return f"{name} has gradients where it is not used"
        a, b = (used[name] * (0.0 if g is None else g) for g in (gradient, expected))
        # Those of biases before a norm are zero but for rounding.
        worst = max(worst, float((a - b).abs().max() / (b.abs().max() + 0.01 * largest + 1e-12)))
    return worst


def tasks(only: str) -> Iterator[tuple[Case, bool]]:
    """Yield the models, and whether the choices are small ones."""
    for small in (False, True):
        for case in CASES:
            kind = SMALL if small else case.kind
            if (case.small or not small) and only in f"{kind}: {case.name}":
                yield case, small


def totals(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the sums of every kind, and of all."""
    kinds = {
        kind: [row for row in rows if row["kind"] == kind] for kind in dict.fromkeys(r["kind"] for r in rows)
    }
    found = {}
    for kind, own in {**kinds, "all": rows}.items():
        refused = sum("refused" in row for row in own)
        found[kind] = {
            **{"models": len(own), "elastic": sum("groups" in row for row in own), "refused": refused},
            **{name: sum(row.get(name, 0) for row in own) for name in COUNTED},
            **{name: max(row.get(name, 0.0) for row in own) for name in ("worst", "worst_gradient")},
            "seconds": round(sum(row["seconds"] for row in own), 1),
        }
    return found


def report(document: dict[str, Any]) -> list[str]:
    """Return the page: sums, what is wrong, and what is refused."""
    facts, versions = document["machine"], document["versions"]
    lines = [
        f"{facts['device_name']}, one thread, "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + f"; {document['seconds']:.0f} s of CPU.",
        "",
        "| kind | models | elastic | refused | subnets | blind | comparisons | wrong | of these crashes | "
        "worst | worst gradient | CPU s |",
        "|---|" + "---|" * 11,
    ]
    for kind, sums in document["kinds"].items():
        numbers = [sums[name] for name in ("models", "elastic", "refused", *COUNTED)]
        worst = [f"{sums[name]:.1e}" for name in ("worst", "worst_gradient")]
        lines.append(f"| {' | '.join(map(str, (kind, *numbers, *worst, sums['seconds'])))} |")
    for title, key in (("Wrong", "faults"), ("Refused", "refused")):
        own = [row for row in document["models"] if row.get(key)]
        lines += ["", f"## {title}", "", *([] if own else ["Nothing."])]
        for row in own:
            why = row[key] if key == "refused" else f"{row['wrong']} wrong; {row[key][0]}"
            lines.append(f"- {row['kind']}: {row['name']}: {' '.join(why.split())[:160]}")
    return lines


def main() -> int:
    """Run, print and write everything; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="run models whose `kind: name` contains this text")
    parser.add_argument("--subnets", type=int, default=8, help="random subnets of every model")
    parser.add_argument("--out", type=Path, default=RESULTS / "meaning.json")
    parser.add_argument("--report", action="store_true", help="write the page in results/ and stop")
    args = parser.parse_args()
    if args.report:
        write_section("meaning", report(json.loads(args.out.read_text(encoding="utf-8"))))
        return 0
    import_torchvision()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started, rows = time.process_time(), []
    for case, small in tqdm(list(tasks(args.only)), "models", disable=None):
        rows.append(run(case, args.subnets, small))
        if rows[-1].get("faults") or args.only:
            tqdm.write(json.dumps(rows[-1]))
    packages = ("torch", "torchvision", "transformers")
    document: dict[str, Any] = {
        "machine": header(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "seconds": _since(started),
        "kinds": totals(rows),
    }
    print(json.dumps(document, indent=1))
    if not args.only:
        models = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        text = json.dumps({**document, "models": []}, indent=1)
        text = text.replace('"models": []', f'"models": [\n{models}\n ]') + "\n"
        args.out.write_text(text, encoding="utf-8")
    return int(document["kinds"]["all"]["wrong"] > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # small_decoders
    sys.exit(main())
