"""A checkpoint to a served bundle: find the subnets worth serving, measure them, and serve them over HTTP.

The checkpoint is the supernet for digits of this package, so that the accuracies are real and nothing is
downloaded. For one of Once-for-All, CompOFA or AutoFormer, let `checkpoint` return
`ofa_adapters.load("ofa_resnet50", "file.pth")`, and `data` your images; all else stays. Its steps:

1. A search evaluates subnets on labelled images and keeps those for which no other one is both more accurate
   and cheaper in multiply-accumulates. It calibrates each before it is evaluated.
2. An engine holds the chosen subnets ready, and `profile_latency` measures each of them on this machine.
3. A bundle, which is a folder, keeps weights, statistics, subnets and latencies.
4. `python -m subnetact.serve` serves the bundle. The less time a request leaves, the smaller the subnet that
   answers it.

Run `pip install 'subnetact[demo,nas,serve]'` and `python examples/serve_checkpoint.py --out DIR`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from torch import Tensor

import subnetact
from subnetact.costs import CostModel
from subnetact.digits import load_digits_supernet, read_digits
from subnetact.latency.plot import plot_front


def checkpoint() -> subnetact.Supernet:
    return load_digits_supernet()


def data() -> tuple[Tensor, list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Return images for calibration, and labelled batches not trained on: to choose and to judge with."""
    training, held_out = read_digits()
    first, second = ([(held_out.images[i::2], held_out.labels[i::2])] for i in range(2))
    return training.images[:200], first, second


def ask(address: str, image: Tensor, deadline_ms: float) -> dict[str, Any]:
    """Return the answer of the server, or the status with which it refuses."""
    body = json.dumps({"input": image.flatten().tolist(), "deadline_ms": deadline_ms}).encode()
    try:
        with urlopen(Request(f"{address}/infer", body, {"Content-Type": "application/json"})) as answer:
            found: dict[str, Any] = json.load(answer)
    except HTTPError as refused:  # 504: no subnet can be in time
        return {"status": refused.code}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("served"), help="folder of the results")
    parser.add_argument("--evaluations", type=int, default=150, help="subnets that the search evaluates")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    supernet, (calibration, validation, test) = checkpoint(), data()
    image = test[0][0][0]
    costs = CostModel(supernet, image[None])

    def accuracy(spec: subnetact.SubnetSpec, on: list[tuple[Tensor, Tensor]] = validation) -> float:
        return subnetact.evaluate(supernet, [spec], on, [calibration], progress=False)[0]

    found = subnetact.search(
        supernet,
        accuracy,
        lambda spec: costs(spec).macs / 1e6,
        size=8,
        evaluations=args.evaluations,
        remeasure_accuracy=lambda spec: accuracy(spec, on=test),
    )
    print(f"{len(found.evaluated)} of {supernet.space.size()} subnets were evaluated; the chosen ones:")
    for one in found.front:
        print(f"{one.accuracy:.1f} %, {one.latency_ms:.1f} million multiply-accumulates: {one.spec}")

    specs, accuracies = [one.spec for one in found.front], [one.accuracy for one in found.front]
    subnetact.calibrate(supernet, specs, [calibration], progress=False)
    engine = subnetact.Engine(supernet, specs, example=image[None], accuracy=accuracies)
    # A front compares subnets that run alike; a scheduler needs each subnet as this engine runs it.
    plot_front(subnetact.profile_latency(engine, [1, 4, 16]), args.out / "front.png")
    engine.tables["scheduler"] = subnetact.profile_latency(engine, [1, 4, 16], mode="as served")
    engine.save(args.out / "bundle")

    command = [sys.executable, "-m", "subnetact.serve", "--bundle", str(args.out / "bundle"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]  # "listening on http://127.0.0.1:NUMBER"
        for deadline_ms in (500, 50, 20, 10, 5):
            print(f"within {deadline_ms} ms: {ask(address, image, deadline_ms)}")
        server.terminate()


if __name__ == "__main__":
    main()
