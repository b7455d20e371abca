"""Experts per token: one mixture of experts generates each part of an answer with another number of experts.

In every layer of a mixture, a router sends each token to the k most suitable of many feed-forward networks,
the experts. A smaller k takes less time, and all k share one copy of the weights, so k may change between
tokens. This measures the time of a token for every k, then lets an answer begin with two experts per token
(to think, say) and end with all eight; `Generator.submit(..., phases=[...])` does the same in a service.

The model is a small Qwen3-MoE with random weights: its times mean something, its text does not. Put yours
into `mixture`. With fewer experts than it was trained with, a model loses quality, so measure that, too.

Run `pip install 'subnetact[hf,plot]'` and `python examples/experts_per_token.py --out DIR`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import subnetact
from subnetact.insertion import cache_relation, switch

EXPERTS_PER_TOKEN = (1, 2, 4, 8)


def mixture() -> Any:
    """Return a language model with 32 experts in each of four layers, of which 8 see each token."""
    sizes: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4, "head_dim": 32}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512}
    sizes |= {"moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 8}
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    return model.eval()


def answer(supernet: Any, prompt: Tensor, experts: list[int]) -> list[float]:
    """Generate one token per entry of `experts`, each with that number of experts; return the ms of each."""
    count, times = len(supernet.space.axes[0].slots), []
    specs = {k: supernet.space.spec(experts=[k] * count) for k in set(experts)}
    output = supernet.subnet(specs[experts[0]])(prompt, use_cache=True)
    cache = output.past_key_values
    for k in experts:
        token, start = output.logits[:, -1:].argmax(-1), time.perf_counter()
        view = switch(supernet, cache, specs[k], allow_approximate=True)
        output = view(token, past_key_values=cache, use_cache=True)
        times.append(1000 * (time.perf_counter() - start))
    return times


def figure(ms: dict[int, float], experts: list[int], times: list[float], path: Path) -> None:
    """Draw the time of a token over k, and the times of all tokens of an answer that changes its k."""
    from matplotlib import pyplot

    _, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    left.bar([str(k) for k in ms], list(ms.values()))
    left.set(xlabel="experts per token, k", ylabel="ms per token (median)")
    for k in dict.fromkeys(experts):
        at = [i for i, used in enumerate(experts) if used == k]
        right.bar(at, [times[i] for i in at], label=f"k = {k}")
    right.set(xlabel="token of one answer, with two phases", ylim=(0, 2 * max(ms.values())))
    right.legend()
    pyplot.tight_layout()
    pyplot.savefig(path, dpi=130)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("experts"), help="folder of the figure")
    parser.add_argument("--rounds", type=int, default=20, help="answers of each k, which take turns")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model, prompt = mixture(), torch.randint(1000, (1, 32))
    before = model(prompt).logits
    example = {"input_ids": prompt, "use_cache": False}
    supernet = subnetact.insert_(model, example=example, axes=("experts",), choices=EXPERTS_PER_TOKEN)
    small, large = supernet.space.smallest(), supernet.space.largest()
    found: dict[int, list[float]] = {k: [] for k in EXPERTS_PER_TOKEN}
    experts = [2] * 12 + [8] * 12
    torch.testing.assert_close(supernet(prompt, subnet=large).logits, before)
    for _ in range(args.rounds):
        for k in EXPERTS_PER_TOKEN:
            found[k] += answer(supernet, prompt, [k] * 8)
    times = answer(supernet, prompt, experts)
    ms = {k: statistics.median(each) for k, each in found.items()}
    print(f"keys and values of k = 1, read with k = 8: {cache_relation(supernet, small, large)}")
    print("\n".join(f"k = {k}: {each:.2f} ms per token" for k, each in ms.items()))
    figure(ms, experts, times, args.out / "times.png")


if __name__ == "__main__":
    main()
