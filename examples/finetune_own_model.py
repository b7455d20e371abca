"""Turn an ordinary timm model into a supernet, train it, and serve it: from random weights, in minutes.

1. A small ResNet of timm learns digits, as an ordinary model.
2. `insert_` makes it elastic, and `reorder_` moves the channels that matter most to the front.
3. The sandwich rule with in-place distillation trains all subnets. The space grows in three phases: depths
   during the first 5 % of the steps, then depths and widths down to three quarters during 5 %, then all
   (progressive shrinking, OFA, ICLR'20; long phases for the large subnets leave the small ones too few
   steps). The learning rate rises and falls once, along a cosine.
4. A search finds subnets on the Pareto front of accuracy and latency, whose statistics are calibrated.
5. For comparison, networks of the sizes of five of them are trained separately from random weights, with the
   same data, distortions, batches, optimiser and schedule, each for a fifth of the steps of 1 and 3. So the
   five together take as many steps as the supernet; a step of 3 runs four subnets on its batch. With
   `--doublings N`, each of the five is trained anew for twice as many steps, N times at the most and until it
   gains less than half a point on the digits that the search uses; the best of these networks counts.
6. `profile_latency` measures the subnets here, and a bundle is written, ready for `python -m subnetact.serve
   --bundle DIR/bundle --model finetune_own_model:new_supernet --constructor
   '{"description": "DIR/description.json"}'`.

A third of the digits is not trained on. The search uses one half of it, in several distortions, and all
accuracies that are reported come from the other half. What is trained is kept in DIR/work, so that a run that
was stopped goes on.

`finetune_own_model.json` and `finetune_own_model.png` are the results of a run with `--elastic-steps 4000
--doublings 1`, on a machine that ran other programs as well; `accuracy_by_steps` says for how long each
separate network was trained.

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
from subnetact.digits import Digits, distort, undistorted_digits
from subnetact.insertion import Description
from subnetact.training import sandwich_step

SIZE = 32
LEARNING_RATE = 3e-3
PHASES = (0.05, 0.1)
"""Shares of the elastic steps after which the space grows."""
COPIES = 8
"""Distortions of every digit that is not trained on."""
GAIN = 0.5
"""Points of accuracy that twice as many steps must gain a separate network, or its training ends."""
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
        return evaluate(supernet, [spec], [test], progress=False)[0]

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
    return [candidate.spec for candidate in found.front]


def split(data: Digits, size: int) -> list[Digits]:
    """Return a data set in parts."""
    return [
        Digits(x, y)
        for x, y in zip(torch.split(data.images, size), torch.split(data.labels, size), strict=True)
    ]


def held_out_digits(data: Digits) -> tuple[Digits, Digits]:
    """Return distorted digits for the search and others for the test."""
    generator = torch.Generator().manual_seed(1)
    parts = (Digits(data.images[i::2], data.labels[i::2]) for i in range(2))
    first, second = (
        digits(Digits(x.repeat(COPIES, 1, 1, 1), labels.repeat(COPIES)), generator) for x, labels in parts
    )
    return first, second


class Work:
    """What is done already, in files of a folder, so that a run that was stopped goes on.

    Attributes:
        cpu_minutes: name -> the time of one core that this took.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.cpu_minutes: dict[str, float] = {}

    def result(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return what is kept under a name; if nothing is, compute and keep it."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            start = time.process_time()
            value = compute()
            part = path.with_suffix(".part")
            torch.save({"value": value, "cpu_minutes": (time.process_time() - start) / 60}, part)
            part.rename(path)
        found = torch.load(path, weights_only=True)
        self.cpu_minutes[name] = round(found["cpu_minutes"], 2)
        return found["value"]

    def trained(self, name: str, network: nn.Module, train: Callable[[], None]) -> None:
        """Train a network, or give it the weights that are kept under a name."""

        def compute() -> dict[str, Tensor]:
            train()
            return network.state_dict()

        network.load_state_dict(self.result(name, compute))
        network.eval()


def train_separately(
    network: nn.Module, work: Work, i: int, data: tuple[Digits, Digits, Digits], steps: int, doublings: int
) -> dict[int, tuple[float, float]]:
    """Train a network from random weights, also for twice as many steps and so on, until that gains nothing.

    Returns:
        Steps -> accuracy in percent on the digits of the search and of the test.
    """
    training, validation, test = data

    def compute(steps: int) -> tuple[float, float]:
        train_alone(reset_(network, seed=10 + i), training, steps, seed=10 + i)
        return accuracy_of(network, validation), accuracy_of(network, test)

    found: dict[int, tuple[float, float]] = {}
    for n in (steps * 2**k for k in range(doublings + 1)):
        found[n] = tuple(work.result(f"separate_{i}_{n}", partial(compute, n)))
        if n > steps and found[n][0] < found[n // 2][0] + GAIN:
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("finetuned"), help="folder of the results")
    parser.add_argument("--steps", type=int, default=500, help="training steps of the ordinary model")
    parser.add_argument("--elastic-steps", type=int, default=4000, help="training steps of the supernet")
    parser.add_argument("--evaluations", type=int, default=60, help="subnets that the search evaluates")
    parser.add_argument(
        "--doublings",
        type=int,
        default=0,
        help="how often the steps of the separate networks are doubled, while that gains them something",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    work = Work(args.out / "work")
    training, held_out = undistorted_digits()
    validation, test = held_out_digits(held_out)

    model = new_model()
    work.trained(f"model_{args.steps}", model, lambda: train_alone(model, training, args.steps, seed=0))
    print(f"the ordinary model has {accuracy_of(model, test):.1f} %")
    description = describe(model, example=test.images[:2])
    (args.out / "description.json").write_text(description.to_json(), encoding="utf-8")
    supernet = insert_(model, description, example=test.images[:2])
    print(supernet.report)
    reorder_(supernet, importance="batch_norm", example=test.images[:2])
    before = supernet.extract(supernet.space.largest())
    print(f"after insertion and reordering the largest subnet has {accuracy_of(before, test):.1f} %")

    fronts = []
    for name in ("before", "after"):
        if name == "after":
            work.trained(
                f"supernet_{args.steps}_{args.elastic_steps}",
                supernet,
                lambda: train_supernet(supernet, training, args.elastic_steps, seed=1),
            )
        keys = work.result(
            f"front_{name}",
            lambda: [spec.key for spec in front(supernet, training, validation, args.evaluations)],
        )
        specs = [supernet.space.parse(key) for key in keys]
        fronts.append(measured(supernet, specs, training, test))

    steps = max(1, (args.steps + args.elastic_steps) // 5)
    chosen = dict.fromkeys(round(i * (len(specs) - 1) / 4) for i in range(5))
    separate = []
    for i in chosen:
        network = supernet.extract(specs[i])
        found = train_separately(network, work, i, (training, validation, test), steps, args.doublings)
        best = max(found, key=lambda n: found[n][0])
        separate.append(
            {
                **fronts[1][i],
                "of_subnet": fronts[1][i]["accuracy"],
                "accuracy": found[steps][1],
                "trained_longer": {"steps": best, "accuracy": found[best][1]},
                "accuracy_by_steps": {n: accuracy for n, (_, accuracy) in found.items()},
            }
        )

    engine = Engine(
        supernet,
        specs,
        example=test.images[:1],
        accuracy=[entry["accuracy"] for entry in fronts[1]],
        memory_budget_mb=64,
    )
    engine.tables["cpu"] = profile_latency(engine, (1, 2, 4, 8, 16), mode="as served")
    engine.save(args.out / "bundle")
    result = {
        "before": fronts[0],
        "after": fronts[1],
        "separate": separate,
        "steps": {"model": args.steps, "elastic": args.elastic_steps, "each separate network": steps},
        "cpu_minutes": work.cpu_minutes,
        "machine": machine(torch.device("cpu")),
    }
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(result, args.out / "front.png")
    for entry in separate:
        print(
            f"{entry['latency_ms']:6.2f} ms: subnet {entry['of_subnet']:.1f} %, trained separately "
            f"{entry['accuracy']:.1f} % ({steps} steps) and {entry['trained_longer']['accuracy']:.1f} % "
            f"({entry['trained_longer']['steps']} steps)"
        )
    print(f"{args.out / 'bundle'} is ready to be served")


def measured(
    supernet: Supernet, specs: Sequence[SubnetSpec], training: Digits, test: Digits
) -> list[dict[str, Any]]:
    """Return the accuracy and the latency of subnets."""
    generator = torch.Generator().manual_seed(6)
    calibrate(supernet, specs, [digits(part, generator).images for part in split(training, 200)])
    engine = Engine(supernet, specs, example=test.images[:1])
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
    separate = result["separate"]
    drawn = [
        (result["before"], f"subnets of the model ({steps['model']} steps), calibrated", "o--"),
        (result["after"], f"subnets after {steps['elastic']} elastic steps", "o-"),
        (separate, f"trained separately, {steps['each separate network']} steps each", "x"),
    ]
    most = max(entry["trained_longer"]["steps"] for entry in separate)
    if most > steps["each separate network"]:
        longer = [{**entry, "accuracy": entry["trained_longer"]["accuracy"]} for entry in separate]
        drawn.append((longer, f"trained separately, up to {most} steps each", "+"))
    for entries, label, style in drawn:
        points = sorted((entry["latency_ms"], entry["accuracy"]) for entry in entries)
        axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="latency at batch 1 (ms)", ylabel="accuracy on unseen digits (%)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
