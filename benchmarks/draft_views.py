"""Views as draft models: how often small subnets of the embedded model agree with the largest, and the time.

`large.generate(assistant_model=small)` of transformers against `large.generate()`, in turns, on beginnings of
Python's help topics. Writes `results/draft_views.json`.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tqdm import tqdm

from subnetact.device import machine
from subnetact.generation import text

PROMPTS, BEGINNING, ANSWER, ROUNDS = 6, 64, 48, 3
RESULT = Path(__file__).parent / "results" / "draft_views.json"


def main() -> None:
    torch.set_num_threads(1)
    supernet, tokenizer = text.load_text_supernet(), text.text_tokenizer()
    specs = text.switchable_subnets(supernet)
    encoded = [[text.END_TOKEN, *one.ids] for one in tokenizer.encode_batch(sorted(topics.values()))]
    long = [one for one in encoded if len(one) > BEGINNING]
    prompts = [torch.tensor([one[:BEGINNING]]) for one in long[:: len(long) // PROMPTS][:PROMPTS]]
    large: Any = supernet.subnet(specs[-1])
    options: Any = {"max_new_tokens": ANSWER, "do_sample": False, "eos_token_id": None}
    with torch.inference_mode():
        plain = [large.generate(prompt, **options) for prompt in prompts]
    rows: list[dict[str, Any]] = []
    for i in tqdm(range(len(specs) - 1), desc="drafts"):
        small: Any = supernet.subnet(specs[i])
        same = agreed = seen = 0
        ratios: list[float] = []
        with torch.inference_mode():
            for prompt, expected in zip(prompts, plain, strict=True):
                found = large.generate(prompt, assistant_model=small, **options)
                same += torch.equal(found, expected)
                guesses = small(expected[:, :-1], use_cache=False).logits.argmax(-1)[:, BEGINNING - 1 :]
                agreed += int((guesses == expected[:, BEGINNING:]).sum())
                seen += guesses.numel()
                for _ in range(ROUNDS):
                    moments = [time.perf_counter()]
                    for draft in (None, small):
                        large.generate(prompt, assistant_model=draft, **options)
                        moments.append(time.perf_counter())
                    ratios.append((moments[1] - moments[0]) / (moments[2] - moments[1]))
        row = {"draft": str(specs[i]), "equal": same, "of": PROMPTS, "agrees": round(agreed / seen, 4)}
        rows.append(row | {"speed_up": round(statistics.median(ratios), 3)})
    facts = {"machine": machine(supernet.device), "load": os.getloadavg()[0], "prompts": PROMPTS}
    facts |= {"beginning": BEGINNING, "answer": ANSWER, "rounds": ROUNDS, "drafts": rows}
    RESULT.write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
