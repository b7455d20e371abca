"""Turn an ordinary timm model into a supernet, train it, and serve it: from random weights, in minutes.

1. A small ResNet of timm learns digits, as an ordinary model.
2. `insert_` makes it elastic, and `reorder_` moves the channels that matter most to the front.
3. The sandwich rule with in-place distillation trains all subnets, for four times as many steps as 1 took.
   The space grows in three phases: depths during the first 5 % of the steps, then depths and widths down to
   three quarters during 5 %, then all (progressive shrinking, OFA, ICLR'20; long phases for the large subnets
   leave the small ones too few steps). The learning rate rises and falls once, along a cosine.
4. A search finds subnets on the Pareto front of accuracy and latency, whose statistics are calibrated.
5. For comparison, networks of the sizes of five of them are trained separately from random weights, each for
   as many steps as 1. So the five together take as many steps as the supernet in 1 and 3, with the same
   recipe. A step of 3 runs four subnets on its batch.
6. `profile_latency` measures the subnets here, and a bundle is written, ready for `python -m subnetact.serve
   --bundle DIR/bundle --model finetune_own_model:new_supernet --constructor
   '{"description": "DIR/description.json"}'`.

`finetune_own_model.json` and `finetune_own_model.png` are the results of a run on an otherwise idle core.

Run `python examples/finetune_own_model.py --out DIR`. The needed extras are vision, auto, demo and nas.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from subnetact import (
    Description,
    Engine,
    SubnetSpec,
    Supernet,
    calibrate,
    describe,
    evaluate,
    insert_,
    profile_latency,
    reorder_,
    search,
)
from subnetact.device import machine
from subnetact.digits import Digits, distort, read_digits
from subnetact.training import sandwich_step

SIZE = 32
LEARNING_RATE = 3e-3
PHASES = (0.05, 0.1)
"""Shares of the elastic steps after which the space grows."""
smoothed = partial(F.cross_entropy, label_smoothing=0.05)


def new_model() -> nn.Module:
    """Return the ordinary model: timm's ResNet-18 with an eighth of its channels, for grey images."""
    import timm

    torch.manual_seed(0)
    model: nn.Module = timm.create_model(
        "resnet18", in_chans=1, num_classes=10, channels=(16, 32, 64, 128), stem_width=8, stem_type="deep"
    )
    return model


def new_supernet(description: str) -> Supernet:
    """Return the model as a supernet with random weights, for `--model` of the commands.

    What is found in a model depends on its weights, because the most important blocks are kept longest. So
    the description of the trained model is kept in a file.
    """
    found = Description.from_json(Path(description).read_text(encoding="utf-8"))
    return insert_(new_model().eval(), found, example=torch.zeros(2, 1, SIZE, SIZE))


def digits(data: Digits, generator: torch.Generator) -> Digits:
    """Return distorted digits in the size of the model's input."""
    return Digits(F.interpolate(distort(data.images, generator), size=SIZE, mode="bilinear"), data.labels)


def batches(data: Digits, steps: int, seed: int, size: int = 64) -> Any:
    """Yield random batches of distorted digits, with a progress bar."""
    generator = torch.Generator().manual_seed(seed)
    for _ in tqdm(range(steps), desc="training", disable=None, leave=False):
        chosen = torch.randint(len(data.labels), (size,), generator=generator)
        yield digits(Digits(data.images[chosen], data.labels[chosen]), generator)


def train(
    network: nn.Module,
    data: Digits,
    steps: int,
    seed: int,
    step: Callable[[Tensor, Tensor, float], object],
    peak: float = LEARNING_RATE,
) -> None:
    """Train for some steps with AdamW and one learning rate cycle.

    `step(x, labels, progress)` computes gradients; progress goes from 0 to 1.
    """
    optimizer = torch.optim.AdamW(network.parameters(), lr=peak, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=max(steps, 30), pct_start=0.1)
    network.train()
    for i, (x, labels) in enumerate(batches(data, steps, seed)):
        optimizer.zero_grad(set_to_none=True)
        step(x, labels, i / steps)
        nn.utils.clip_grad_norm_(network.parameters(), 2.0)
        optimizer.step()
        schedule.step()
    network.eval()


def train_alone(network: nn.Module, data: Digits, steps: int, seed: int) -> None:
    """Train an ordinary network on the labels."""

    def step(x: Tensor, labels: Tensor, progress: float) -> None:  # noqa: ARG001
        torch.autograd.backward(smoothed(network(x), labels))

    train(network, data, steps, seed, step)


def train_supernet(supernet: Supernet, data: Digits, steps: int, seed: int) -> None:
    """Train all subnets, in three phases that allow ever smaller ones."""
    rng = random.Random(seed)

    def step(x: Tensor, labels: Tensor, progress: float) -> None:
        phase = sum(progress >= share for share in PHASES)
        smallest = shrunk(supernet, supernet.space.smallest(), phase)
        chosen = [supernet.space.largest(), smallest]
        chosen += [shrunk(supernet, supernet.space.sample(rng), phase) for _ in range(2)]
        sandwich_step(
            supernet, x, labels, rng=rng, loss=smoothed, subnets=list(dict.fromkeys(chosen)), distillation=0.7
        )

    train(supernet, data, steps, seed, step)


def shrunk(supernet: Supernet, spec: SubnetSpec, phase: int) -> SubnetSpec:
    """Return a subnet that a phase allows: 0 full widths, 1 down to the second choice from the top, 2 all."""
    values: dict[str, list[Any]] = {}
    given = dict(spec.values)
    for axis in supernet.space.axes:
        values[axis.name] = []
        for slot, value in zip(axis.slots, given[axis.name], strict=True):
            allowed = list(slot.choices if axis.name == "depth" else slot.choices[-1 - phase :])
            values[axis.name].append(value if value in allowed or value is None else allowed[0])
    return supernet.space.spec(**values)


def accuracy_of(network: nn.Module, data: Digits) -> float:
    """Return the top-1 accuracy of an ordinary network in percent."""
    with torch.inference_mode():
        return 100 * float((network(data.images).argmax(1) == data.labels).float().mean())


def reset_(network: nn.Module, seed: int) -> nn.Module:
    """Give a network new random weights, in place."""
    torch.manual_seed(seed)
    for module in network.modules():
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return network


def front(supernet: Supernet, training: Digits, test: Digits, evaluations: int) -> list[SubnetSpec]:
    """Return subnets on the Pareto front of accuracy and latency, measured with the machine as it is."""
    generator = torch.Generator().manual_seed(5)
    data = [digits(part, generator).images for part in split(training, 200)[:3]]
    x = test.images[:1]

    def accuracy(spec: SubnetSpec) -> float:
        calibrate(supernet, [spec], data, progress=False)
        return evaluate(supernet, spec, [test], progress=False)

    def latency(spec: SubnetSpec) -> float:
        view = supernet.subnet(spec)
        taken = []
        with torch.inference_mode():
            for _ in range(12):
                start = time.perf_counter()
                view(x)
                taken.append(1e3 * (time.perf_counter() - start))
        return sorted(taken)[3]

    found = search(supernet, accuracy, latency, size=12, evaluations=evaluations, seed=0)
    return [candidate.spec for candidate in found]


def split(data: Digits, size: int) -> list[Digits]:
    """Return a data set in parts."""
    return [
        Digits(x, y)
        for x, y in zip(torch.split(data.images, size), torch.split(data.labels, size), strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("finetuned"), help="folder of the results")
    parser.add_argument(
        "--steps",
        type=int,
        default=500,
        help="training steps of the model, a quarter of the supernet's after it, and those of each network "
        "that is trained separately",
    )
    parser.add_argument("--evaluations", type=int, default=60, help="subnets that the search evaluates")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter(), time.process_time()
    training, held_out = read_digits()
    generator = torch.Generator().manual_seed(1)
    test = digits(Digits(held_out.images.repeat(4, 1, 1, 1), held_out.labels.repeat(4)), generator)
    halves = Digits(test.images[::2], test.labels[::2]), Digits(test.images[1::2], test.labels[1::2])
    validation, test = halves

    model = new_model()
    train_alone(model, training, args.steps, seed=0)
    print(f"the ordinary model has {accuracy_of(model, test):.1f} %")
    description = describe(model, example=test.images[:2])
    (args.out / "description.json").write_text(description.to_json(), encoding="utf-8")
    supernet = insert_(model, description, example=test.images[:2])
    print(supernet.report)
    reorder_(supernet, importance="batch_norm", example=test.images[:2])
    before = supernet.extract(supernet.space.largest())
    print(f"after insertion and reordering the largest subnet has {accuracy_of(before, test):.1f} %")

    specs = front(supernet, training, validation, args.evaluations)
    untrained = measured(supernet, specs, training, test)
    train_supernet(supernet, training, 4 * args.steps, seed=1)
    specs = front(supernet, training, validation, args.evaluations)
    trained = measured(supernet, specs, training, test)

    chosen = [specs[round(i * (len(specs) - 1) / 4)] for i in range(5)]
    chosen = list(dict.fromkeys(chosen))
    separate = []
    for i, spec in enumerate(chosen):
        network = reset_(supernet.extract(spec), seed=10 + i)
        train_alone(network, training, args.steps, seed=10 + i)
        entry = trained[specs.index(spec)]
        separate.append({**entry, "accuracy": accuracy_of(network, test), "of_subnet": entry["accuracy"]})

    engine = Engine(
        supernet,
        specs,
        example=test.images[0],
        accuracy=[entry["accuracy"] for entry in trained],
        memory_budget_mb=64,
    )
    engine.tables["cpu"] = profile_latency(engine, (1, 2, 4, 8, 16))
    engine.save(args.out / "bundle")
    result = {
        "before": untrained,
        "after": trained,
        "separate": separate,
        "steps": {"model": args.steps, "elastic": 4 * args.steps, "each separate network": args.steps},
        "minutes": round((time.perf_counter() - begin[0]) / 60, 1),
        "cpu_minutes": round((time.process_time() - begin[1]) / 60, 1),
        "machine": machine(torch.device("cpu")),
    }
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(result, args.out / "front.png")
    for entry in separate:
        print(
            f"{entry['latency_ms']:6.2f} ms: subnet {entry['of_subnet']:.1f} %, trained separately "
            f"{entry['accuracy']:.1f} %"
        )
    print(f"{args.out / 'bundle'} is ready to be served; it took {result['minutes']} minutes")


def measured(
    supernet: Supernet, specs: Sequence[SubnetSpec], training: Digits, test: Digits
) -> list[dict[str, Any]]:
    """Return the accuracy and the latency of subnets."""
    generator = torch.Generator().manual_seed(6)
    calibrate(supernet, specs, [digits(part, generator).images for part in split(training, 200)])
    engine = Engine(supernet, specs, example=test.images[0])
    table = profile_latency(engine, (1,), min_time_ms=200)
    accuracy = evaluate(supernet, specs, split(test, 256))
    return [
        {"subnet": spec.key, "latency_ms": float(ms), "accuracy": percent}
        for spec, ms, percent in zip(specs, table.latency_ms[:, 0], accuracy, strict=True)
    ]


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the fronts before and after training, and the networks that were trained separately."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes, steps = figure.subplots(), result["steps"]
    for name, label, style in (
        ("before", f"subnets of the model ({steps['model']} steps), calibrated", "o--"),
        ("after", f"subnets after {steps['elastic']} elastic steps", "o-"),
        (
            "separate",
            f"networks of the same sizes, trained separately ({steps['each separate network']} steps each)",
            "x",
        ),
    ):
        points = sorted((entry["latency_ms"], entry["accuracy"]) for entry in result[name])
        axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="latency at batch 1 (ms)", ylabel="accuracy on unseen digits (%)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
