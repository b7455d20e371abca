"""Whether the surrogate of the search should compare all subnets of a small space: `python small_spaces.py`.

The accuracies of the 864 digits subnets are those of results/search_digits_accuracy.json, and 16 times those
with the noise that as many other images would make. Prints the shares of `whole_small_spaces` in results/trials.json.
"""

from __future__ import annotations

import json

import numpy as np
from search import TRUTH, share, true_digits

from subnetact import search
from subnetact.nas import methods

if __name__ == "__main__":
    supernet, accuracy, macs, _ = true_digits(TRUTH)
    specs, rng = list(accuracy), np.random.default_rng(0)
    percent = np.array([accuracy[spec] for spec in specs])
    noise = np.sqrt(percent * (100 - percent) / 2396)
    truths = [percent, *(percent + noise * rng.standard_normal(len(specs)) for _ in range(16))]
    shares: dict[str, dict[str, dict[str, float]]] = {}
    for name, limit in (("children", 0), ("all", methods.COMPARED_SPACE)):
        methods.COMPARED_SPACE = limit
        for evaluations in (50, 100, 200):
            found = []
            for seed, values in enumerate(truths):
                truth = dict(zip(specs, values.tolist(), strict=True))
                points = [(truth[spec], macs[spec]) for spec in specs]
                reference = min(a for a, _ in points), max(m for _, m in points)
                options = {"evaluations": evaluations, "seed": seed, "progress": False}
                run = search(supernet, truth.__getitem__, macs.__getitem__, method="evolution", **options)
                whole = search(supernet, truth.__getitem__, macs.__getitem__, evaluations=864, progress=False)
                found.append(share(run.evaluated, reference, whole.hypervolume(reference)))
            row = {"repository": found[0], "mean": np.mean(found), "worst": min(found)}
            shares.setdefault(name, {})[str(evaluations)] = {k: round(float(v), 4) for k, v in row.items()}
            print(name, evaluations, shares[name][str(evaluations)], flush=True)
    print(json.dumps(shares))
