"""A pipeline of two supernets: find the digits on a page, then read them, under a deadline and a burst.

    python examples/read_pages.py --out DIR

The pages are composed of scikit-learn's handwritten digits, distorted, on noise. The detector is a small
network of elastic width, which is trained here; the reader is the embedded supernet for digits. Both stages
choose a subnet per batch, so that pages are answered in time during a burst, and as well as possible before
and after. The same pages are served by the largest and by the smallest subnets alone. A page counts only if
it is answered in time; the score is the share of all digits that were found and read right.

`read_pages.json` and `read_pages.png` are the results of a run on two cores, which took a minute. The
figure shows where the time of every page went, per stage. The extra needed is demo.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subnetact import (
    Axis,
    Engine,
    LatencyTable,
    SubnetSpace,
    Supernet,
    WeightSlice,
    calibrate,
    insert_,
    profile_latency,
)
from subnetact.device import machine
from subnetact.digits import SIDE, Digits, distort, load_digits_supernet, undistorted_digits
from subnetact.serving import Fixed, Pipeline, PipelineAnswer, Stage

PAGE = 64
"""Pages have this many rows and columns of pixels, and 3 x 3 cells with at most one digit each."""
CELL = PAGE // 3
MEAN_DIGITS = 5.0
STRIDE = 4
"""The maps of the detector have a square for so many pixels in each direction."""
WIDTHS = (8, 16, 32)
BURST = 1.5
"""Rate of the burst, and below it that before and after, relative to what the largest subnets can do."""
CALM = 0.3
PARTS = [(stage, part) for stage in ("find", "cut", "read") for part in ("waits", "runs")]

Place = tuple[int, int]
"""Row and column of the upper left corner of a digit."""


# -- pages ---------------------------------------------------------------------------------------------


@dataclass
class Pages:
    """Pages of shape (n, 1, PAGE, PAGE), and for each page the place and the label of every digit."""

    images: Tensor
    digits: list[list[tuple[Place, int]]]


def compose(source: Digits, n: int, generator: torch.Generator) -> Pages:
    """Compose pages of one to nine distorted digits on noise."""
    images = 0.2 * torch.randn(n, 1, PAGE, PAGE, generator=generator)
    digits: list[list[tuple[Place, int]]] = []
    chosen = torch.randint(len(source.labels), (n, 9), generator=generator)
    tiles = distort(source.images[chosen.flatten()], generator).view(n, 9, 1, SIDE, SIDE)
    for page in range(n):
        count = int(torch.randint(1, 10, (1,), generator=generator))
        labels = source.labels[chosen[page]].tolist()
        cells = torch.randperm(9, generator=generator)[:count].tolist()
        shifts = torch.randint(0, CELL - SIDE + 1, (count, 2), generator=generator).tolist()
        placed = []
        for i, (cell, (down, right)) in enumerate(zip(cells, shifts, strict=True)):
            row, column = cell // 3 * CELL + down, cell % 3 * CELL + right
            images[page, :, row : row + SIDE, column : column + SIDE] = tiles[page, i]
            placed.append(((row, column), labels[i]))
        digits.append(placed)
    return Pages(images, digits)


def maps_of(pages: Pages) -> Tensor:
    """Return the maps that a perfect detector gives, (n, 3, 16, 16).

    They say whether the centre of a digit is in a square, and how far below and right of the square's corner.
    """
    maps = torch.zeros(len(pages.digits), 3, PAGE // STRIDE, PAGE // STRIDE)
    for page, digits in enumerate(pages.digits):
        for (row, column), _ in digits:
            y, x = row + SIDE // 2, column + SIDE // 2
            there = torch.tensor([1.0, y % STRIDE / STRIDE, x % STRIDE / STRIDE])
            maps[page, :, y // STRIDE, x // STRIDE] = there
    return maps


def cut(given: dict[str, Tensor]) -> list[tuple[Tensor, Place]]:
    """Cut the digits out of a page: the image and the place of every digit that the detector found."""
    page, maps = given["page"], given["find"]
    score = maps[0]
    highest = F.max_pool2d(score[None, None], 5, 1, 2)[0, 0]
    padded = F.pad(page, (SIDE,) * 4)
    found = []
    for y, x in ((score == highest) & (score > 0)).nonzero().tolist():
        row = round((y + float(maps[1, y, x].clamp(0, 1))) * STRIDE) - SIDE // 2
        column = round((x + float(maps[2, y, x].clamp(0, 1))) * STRIDE) - SIDE // 2
        tile = padded[:, row + SIDE : row + 2 * SIDE, column + SIDE : column + 2 * SIDE]
        found.append((tile, (row, column)))
    return found


def matches(found: list[tuple[Place, int | None]], digits: list[tuple[Place, int]]) -> int:
    """Return how many digits were found within 8 pixels and, unless the label found is None, read right."""
    return sum(
        any(abs(y - row) + abs(x - column) <= 8 and read in (None, label) for (y, x), read in found)
        for (row, column), label in digits
    )


# -- the two stages ------------------------------------------------------------------------------------


class Detector(nn.Module):
    """Gives the three maps of a page; see `maps_of`. The first one is a logit."""

    def __init__(self) -> None:
        super().__init__()
        widest = WIDTHS[-1]
        self.a = nn.Conv2d(1, widest, 5, 2, 2)
        self.b = nn.Conv2d(widest, widest, 3, 2, 1)
        self.c = nn.Conv2d(widest, widest, 3, 1, 1)
        self.d = nn.Conv2d(widest, widest, 3, 1, 1)
        self.out = nn.Conv2d(widest, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 1, 64, 64) to (n, 3, 16, 16)."""
        x = F.relu(self.b(F.relu(self.a(x))))
        out: Tensor = self.out(F.relu(self.d(F.relu(self.c(x)))))
        return out


def new_detector() -> Supernet:
    """Return the detector with an elastic width."""
    widths = Axis.uniform("width", ["all"], WIDTHS)
    space = SubnetSpace("page_detector", [widths], lambda values: {"w": values["width"][0]})
    inner = {name: WeightSlice.on(in_="w", out="w") for name in ("b", "c", "d")}
    ends = {"a": WeightSlice.on(out="w"), "out": WeightSlice.on(in_="w")}
    return insert_(Detector(), space, {**inner, **ends})


def train_detector(supernet: Supernet, source: Digits, steps: int) -> None:
    """Train all widths together."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(supernet.parameters(), 2e-3)
    specs = [supernet.space.parse({"width": [width]}) for width in WIDTHS]
    supernet.train()
    for _ in range(steps):
        pages = compose(source, 24, generator)
        wanted = maps_of(pages)
        centre = wanted[:, 0]
        optimizer.zero_grad()
        for spec in specs:
            maps = supernet(pages.images, subnet=spec)
            there = F.binary_cross_entropy_with_logits(maps[:, 0], centre, pos_weight=torch.tensor(8.0))
            away = ((maps[:, 1:] - wanted[:, 1:]).abs() * centre[:, None]).sum() / centre.sum()
            (there + 0.3 * away).backward()
        optimizer.step()
    supernet.eval()


def finder(supernet: Supernet, pages: Pages) -> tuple[Engine, list[float]]:
    """Return the engine of a detector, and the share of the digits that every width finds, percent."""
    specs = [supernet.space.parse({"width": [width]}) for width in WIDTHS]
    engine = Engine(supernet, specs, example=pages.images[:1], memory_budget_mb=64)
    total = sum(map(len, pages.digits))
    percent = []
    for subnet in engine.ids:
        maps = engine(pages.images, subnet)
        found: list[list[tuple[Place, int | None]]] = [
            [(place, None) for _, place in cut({"page": image, "find": one})]
            for image, one in zip(pages.images, maps, strict=True)
        ]
        percent.append(100.0 * sum(map(matches, found, pages.digits)) / total)
    return engine, percent


def reader(train: Digits, held_out: Digits) -> tuple[Engine, list[float]]:
    """Return the engine of the reader, and the accuracy of its subnets, percent."""
    supernet = load_digits_supernet()
    space = supernet.space
    specs = [
        space.smallest(),
        space.parse({"depth": [1, 1, 1], "expand": [0.25, 0.25, 0.25], "width": [0.5]}),
        space.parse({"depth": [2, 2, 2], "expand": [0.25, 0.25, 0.25], "width": [1.0]}),
        space.largest(),
    ]
    images = distort(train.images, torch.Generator().manual_seed(0))
    calibrate(supernet, specs, [images[i : i + 100] for i in range(0, len(images), 100)])
    engine = Engine(supernet, specs, example=torch.zeros(1, 1, SIDE, SIDE), memory_budget_mb=256)
    tiles = distort(held_out.images, torch.Generator().manual_seed(3))
    right = [engine(tiles, subnet).argmax(1) == held_out.labels for subnet in engine.ids]
    return engine, [100.0 * float(one.float().mean()) for one in right]


def measured(engine: Engine, percent: list[float]) -> LatencyTable:
    """Return the latency table of an engine on this machine."""
    for subnet in engine.ids:
        engine.pin(subnet)
    table = profile_latency(engine, [1, 2, 4, 8, 16], warmup_ms=20, min_time_ms=60, mode="as served")
    return table.with_accuracy(percent).monotone()


def new_stages(find: Engine, read: Engine, tables: dict[str, LatencyTable]) -> list[Stage]:
    """Return the stages, which choose their subnets.

    Two of them hand the page and the places of its digits on, which the networks do not need.
    """
    return [
        Stage("page", lambda page: page, expected_ms=0.1),
        Stage("find", find, table=tables["find"]),
        Stage("cut", cut, after=["page", "find"], expected_ms=0.5),
        Stage(
            "read",
            read,
            after=["cut"],
            prepare=lambda found: [tile for tile, _ in found],
            each=True,
            inputs=MEAN_DIGITS,
            table=tables["read"],
        ),
        Stage("places", lambda found: [place for _, place in found], after=["cut"], expected_ms=0.1),
    ]


def fixed(stages: list[Stage], largest: bool) -> list[Stage]:
    """Return the same stages with one subnet each: the most accurate or the fastest."""
    found = []
    for stage in stages:
        if stage.table is not None:
            of = np.argmax(stage.table.accuracy) if largest else np.argmin(stage.table.latency_ms[:, -1])
            stage = replace(stage, policy=Fixed(stage.table, int(of)))
        found.append(stage)
    return found


# -- serving -------------------------------------------------------------------------------------------


def serve(
    stages: list[Stage], slo_ms: float, pages: Pages, order: list[int], times: npt.NDArray[np.float64]
) -> list[PipelineAnswer | None]:
    """Send pages at certain times, s, and return the answers; None for pages that were dropped."""
    with Pipeline(stages, slo_ms=slo_ms, sample=pages.images[0], threads_per_worker=1) as pipeline:
        for page in pages.images[:8]:
            pipeline.submit(page, 10_000.0).result()
        gc.collect()
        gc.freeze()  # a full collection of torch's objects would stop all stages for a tenth of a second
        futures, start = [], time.perf_counter()
        for at, page in zip(times.tolist(), order, strict=True):
            time.sleep(max(0.0, start + at - time.perf_counter()))
            futures.append(pipeline.submit(pages.images[page]))
        return [None if future.exception() is not None else future.result() for future in futures]


def read_right(answer: PipelineAnswer | None, digits: list[tuple[Place, int]]) -> int:
    """Return how many digits of a page were found and read right, in time."""
    if answer is None or not answer.met:
        return 0
    labels = [int(scores.argmax()) for scores in answer.output["read"]]
    return matches(list(zip(answer.output["places"], labels, strict=True)), digits)


def times_of(answer: PipelineAnswer) -> list[float]:
    """Return how long a page waited and ran at every stage, ms, in the order of `PARTS`.

    If a page has several inputs at a stage, the one that ended last counts.
    """
    found = []
    for stage, part in PARTS:
        last = max(answer.stages.get(stage, []), key=lambda t: t.waited_ms + t.ran_ms, default=None)
        found.append(0.0 if last is None else last.waited_ms if part == "waits" else last.ran_ms)
    return found


def capacity(stages: list[Stage], pages: Pages) -> float:
    """Return how many pages per second the largest subnets answer when there is always work."""
    largest, first, order = fixed(stages, largest=True), list(range(100)), list(range(100)) * 6
    serve(largest, 60_000.0, pages, first, np.zeros(len(first)))  # the first pages are slower
    start = time.perf_counter()
    serve(largest, 60_000.0, pages, order, np.zeros(len(order)))
    return len(order) / (time.perf_counter() - start)


def summary(
    answers: list[PipelineAnswer | None], pages: Pages, order: list[int], burst: npt.NDArray[np.bool_]
) -> dict[str, Any]:
    """Return the figures of one run, for all pages, those of the burst, and the others.

    The mean times per stage are those of the pages that were answered in time.
    """
    right = np.array([read_right(a, pages.digits[page]) for a, page in zip(answers, order, strict=True)])
    digits = np.array([len(pages.digits[page]) for page in order])
    met = np.array([answer is not None and answer.met for answer in answers])
    found: dict[str, Any] = {}
    for name, some in (("all", np.ones_like(burst)), ("burst", burst), ("calm", ~burst)):
        chosen = [a for a, inside in zip(answers, some, strict=True) if inside and a is not None]
        in_time = [times_of(answer) for answer in chosen if answer.met]
        parts = np.mean(in_time, axis=0) if in_time else []
        found[name] = {
            "pages": int(some.sum()),
            "in_time_percent": 100.0 * float(met[some].mean()),
            "read_right_percent": 100.0 * float(right[some].sum() / digits[some].sum()),
            "p99_ms": float(np.percentile([answer.latency_ms for answer in chosen], 99)) if chosen else None,
            "mean_ms": dict(zip((" ".join(part) for part in PARTS), map(float, parts), strict=False)),
        }
    return found


def plot(
    runs: dict[str, list[PipelineAnswer | None]], times: npt.NDArray[np.float64], slo_ms: float, path: Path
) -> None:
    """Draw where the time of every page went, per stage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colours = ["#c6dbef", "#2171b5", "#d9d9d9", "#636363", "#fdd0a2", "#d94801"]
    figure, axes = plt.subplots(len(runs), 1, figsize=(9, 7), sharex=True, sharey=True, layout="constrained")
    for axis, (name, answers) in zip(axes, runs.items(), strict=True):
        answered = [(at, answer) for at, answer in zip(times, answers, strict=True) if answer is not None]
        parts = np.array([times_of(answer) for _, answer in answered]).T
        labels = [" ".join(part) for part in PARTS]
        axis.stackplot([at for at, _ in answered], parts, labels=labels, colors=colours, step="mid")
        lost = [at for at, answer in zip(times, answers, strict=True) if answer is None]
        axis.plot(lost, [1.25 * slo_ms] * len(lost), "|", color="crimson", label="dropped")
        axis.axhline(slo_ms, color="black", linestyle=":", label="deadline")
        axis.set_ylim(0, 1.3 * slo_ms)
        axis.set_title(name, fontsize=10)
        axis.set_ylabel("ms per page")
    axes[-1].set_xlabel("time of submission, s")
    axes[0].legend(fontsize=7, ncols=4, loc="upper left")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("read_pages"), help="folder of the results")
    parser.add_argument("--steps", type=int, default=400, help="training steps of the detector")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of each run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train, held_out = undistorted_digits()
    detector = new_detector()
    train_detector(detector, train, options.steps)
    print(f"trained the detector in {time.perf_counter() - begin:.0f} s")
    find, found_percent = finder(detector, compose(held_out, 100, torch.Generator().manual_seed(2)))
    read, read_percent = reader(train, held_out)
    tables = {"find": measured(find, found_percent), "read": measured(read, read_percent)}
    for name, table in tables.items():
        for key, percent, row in zip(table.subnets, table.accuracy, table.latency_ms.tolist(), strict=True):
            print(f"{name} {key:<52} {percent:6.2f} % {row[0]:6.2f} ms, {row[-1]:6.2f} ms per 16")
    pages = compose(held_out, 200, torch.Generator().manual_seed(1))
    stages = new_stages(find, read, tables)
    most = capacity(stages, pages)
    slo_ms = max(60.0, 20e3 / most)
    rng, third = np.random.default_rng(0), options.seconds / 3
    periods = [(0.0, CALM), (third, BURST), (2 * third, CALM)]
    times = np.concatenate(
        [start + np.sort(rng.uniform(0, third, int(share * most * third) + 1)) for start, share in periods]
    )
    burst = (times >= third) & (times < 2 * third)
    order = rng.integers(0, len(pages.digits), len(times)).tolist()
    print(f"{most:.0f} pages/s at most with the largest subnets; {slo_ms:.0f} ms per page")
    choices = {
        "a subnet per batch": stages,
        "the largest subnets": fixed(stages, largest=True),
        "the smallest subnets": fixed(stages, largest=False),
    }
    runs, figures = {}, {}
    print(f"{'':<24}{'in time':>10}{'read right in time':>20}{'in the burst':>14}{'otherwise':>11}")
    for name, chosen in choices.items():
        runs[name] = serve(chosen, slo_ms, pages, order, times)
        figures[name] = summary(runs[name], pages, order, burst)
        right = [figures[name][part]["read_right_percent"] for part in ("all", "burst", "calm")]
        print(
            f"{name:<24}{figures[name]['all']['in_time_percent']:>8.2f} %"
            f"{right[0]:>18.2f} %{right[1]:>12.2f} %{right[2]:>9.2f} %"
        )
    result = {
        "machine": machine(torch.device("cpu")),
        "seconds": round(time.perf_counter() - begin, 1),
        "slo_ms": slo_ms,
        "pages_per_s": {"most": most, "calm": CALM * most, "burst": BURST * most},
        "tables": {
            name: {
                "subnets": list(table.subnets),
                "accuracy": list(table.accuracy),
                "batch_sizes": list(table.batch_sizes),
                "latency_ms": table.latency_ms.tolist(),
            }
            for name, table in tables.items()
        },
        "runs": figures,
    }
    (options.out / "read_pages.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(runs, times, slo_ms, options.out / "read_pages.png")
    print(f"results: {options.out}; {result['seconds']} s")


if __name__ == "__main__":
    main()
