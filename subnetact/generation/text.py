"""The embedded language model: a small elastic Llama, trained on docstrings of the standard library."""

from __future__ import annotations

import ast
import json
import sysconfig
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from subnetact.errors import FileFormatError, MissingExtra
from subnetact.files.tensors import read_tensors
from subnetact.insertion.description import Description
from subnetact.insertion.insert import describe, insert_
from subnetact.insertion.key_value_cache import switch
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "end_of_text",
    "load_text_supernet",
    "new_text_supernet",
    "next_token_quality",
    "read_text",
    "switchable_subnets",
    "text_facts",
    "text_tokenizer",
    "tokens",
]

VOCABULARY = 1024
CONTEXT = 512
"""Tokens that the model was trained to look back."""
LAYERS = 4
FFN = (56, 112, 224, 448, 896)
"""Widths of the feed-forward network of every layer."""
KEPT, IMPORTANT_LAYERS = (2, 3, 4), (3, 1, 2)
"""Numbers of layers that a subnet keeps; those that it can skip, the ones that are kept longest first."""
DATA = files("subnetact") / "data"
WEIGHTS, TOKENIZER, FACTS = "text_supernet.safetensors", "text_tokenizer.json", "text_supernet.json"
HEAD = "lm_head.weight"
"""The same tensor as the embedding; files do not hold it."""
END = "<|end|>"
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data"}
"""Folders of the standard library that are not read."""


def _missing(error: ImportError) -> MissingExtra:
    return MissingExtra(
        f"the embedded language model needs transformers: pip install 'subnetact[hf]' ({error})"
    )


def new_text_supernet() -> Supernet:
    """Return the elastic language model with random weights, in evaluation mode.

    The model is a Llama of transformers with 4 layers of 192 features, 6 heads in 3 groups, and a vocabulary
    of 1,024 byte pairs. The width of every feed-forward network is a choice, and so is the number of layers.

    Raises:
        MissingExtra: transformers is not installed (`pip install 'subnetact[hf]'`).
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise _missing(error) from error

    config = LlamaConfig(
        hidden_size=192,
        intermediate_size=FFN[-1],
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    model.train(False)
    x = torch.arange(16).view(2, 8)
    found = describe(model, x, axes=("depth", "ffn"), choices={"ffn": FFN}, proof=False)
    (stage,) = found.stages.values()
    stack = stage.blocks[0].rpartition(".")[0]
    blocks = tuple(f"{stack}.{i}" for i in IMPORTANT_LAYERS)
    sizes: dict[float, int] = {kept: kept - 1 for kept in KEPT}
    stages = [replace(stage, blocks=blocks, sizes=sizes)]
    description = Description("text", found.groups.values(), stages, found.refused)
    supernet = insert_(model, description, example=x)
    supernet.origin = {"name": "text", "constructor": {}}
    return supernet


def load_text_supernet(weights: Path | None = None) -> Supernet:
    """Return the trained language model (float16 on disk, float32 in memory).

    Args:
        weights: a file that `examples/train_text_supernet.py` wrote. If None, the one of the package.

    Raises:
        MissingExtra: transformers is not installed (`pip install 'subnetact[hf]'`).
        FileFormatError: the file does not exist or is damaged, or it holds other tensors than the model.
    """
    with nullcontext(weights) if weights else as_file(DATA / WEIGHTS) as path:
        state = read_tensors(path)
    supernet = new_text_supernet()
    shapes = {name: tensor.shape for name, tensor in supernet.state_dict().items() if name != HEAD}
    fits = {name: tensor.shape for name, tensor in state.items()} == shapes
    if not fits or not all(t.is_floating_point() and t.isfinite().all() for t in state.values()):
        raise FileFormatError(
            f"{path}: not the weights of this model; write them with examples/train_text_supernet.py"
        )
    state = {name: tensor.float() for name, tensor in state.items()}
    supernet.load_state_dict({**state, HEAD: state["model.embed_tokens.weight"]})
    return supernet


def text_facts() -> dict[str, Any]:
    """Return the settings with which the model of the package was trained, and what it reaches.

    Under `held_out` is per subnet the `loss` in nats per token, and in percent the share of next tokens that
    it predicts right (`right_percent`).
    """
    found: dict[str, Any] = json.loads((DATA / FACTS).read_text(encoding="utf-8"))
    return found


def switchable_subnets(supernet: Supernet) -> list[SubnetSpec]:
    """Return the subnets of all layers, from the narrowest to the widest, of the language model.

    They can continue on each other's key-value caches approximately; a subnet of fewer layers could not.
    """
    return [supernet.space.spec(depth=[KEPT[-1]], ffn=[width] * LAYERS) for width in FFN]


@lru_cache(maxsize=1)
def text_tokenizer() -> Tokenizer:
    """Return the byte-pair tokenizer of the language model; MissingExtra if tokenizers is not installed."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise _missing(error) from error
    return Tokenizer.from_str((DATA / TOKENIZER).read_text(encoding="utf-8"))


def end_of_text() -> int:
    """Return the token that begins and ends every text, 0."""
    return 0


def read_text(held_out: bool) -> list[str]:
    """Return docstrings of the running Python's standard library.

    Every text has the form of a session: a line `>>> help(json.dumps)`, the signature, and the docstring. The
    texts of every tenth module, chosen by the checksum of its name, are held out from training: those are
    returned, or, without `held_out`, the others.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    for path in sorted(library.rglob("*.py")):
        place = path.relative_to(library)
        if LEFT_OUT.intersection(place.parts):
            continue
        name = ".".join(place.with_suffix("").parts).removesuffix(".__init__")
        if (zlib.crc32(name.encode()) % 10 == 0) is not held_out:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of invalid escapes
                found.extend(_texts(name, ast.parse(path.read_text(encoding="utf-8"))))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue  # The library contains files that are damaged on purpose.
    return found


def _texts(name: str, node: ast.AST) -> Iterator[str]:
    documentation = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
    if documentation and len(documentation) >= 40:
        yield f">>> help({name})\n{_signature(name, node)}\n{documentation.strip()}\n"
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _DOCUMENTED):
            yield from _texts(f"{name}.{child.name}", child)  # type: ignore[union-attr]


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _signature(name: str, node: Any) -> str:
    last = name.rpartition(".")[2]
    if isinstance(node, ast.Module):
        return f"module {last}"
    if isinstance(node, ast.ClassDef):
        return f"class {last}({', '.join(ast.unparse(base) for base in node.bases)})"
    return f"{last}({ast.unparse(node.args)})"


def tokens(texts: Sequence[str]) -> torch.Tensor:
    """Return the tokens of texts in a row, each behind an end-of-text token, of shape (tokens,)."""
    found: list[int] = []
    for encoding in text_tokenizer().encode_batch(list(texts)):
        found.append(end_of_text())
        found.extend(encoding.ids)
    return torch.tensor(found)


@torch.inference_mode()
def next_token_quality(
    supernet: Supernet, spec: SubnetSpec, stream: torch.Tensor, written_by: SubnetSpec | None = None
) -> tuple[float, float]:
    """Measure how well a subnet predicts the next token.

    Args:
        supernet: the language model.
        spec: the subnet.
        stream: tokens of texts, of shape (tokens,). They are cut into pieces of half the model's context.
        written_by: a subnet that computes the keys and values of the first half of every piece, on which
            `spec` continues. If given, only the second half of every piece is predicted.

    Returns:
        The mean loss in nats per token, and the share of next tokens that are predicted right, in percent.
    """
    length = CONTEXT // 2
    pieces = stream[: len(stream) // (length + 1) * (length + 1)].view(-1, length + 1)
    first = 0 if written_by is None else length // 2
    loss, right, seen = 0.0, 0, 0
    for piece in torch.split(pieces, 8):
        given, wanted = piece[:, first:-1], piece[:, first + 1 :]
        if written_by is None:
            logits = supernet.subnet(spec)(given, use_cache=False).logits
        else:
            cache = supernet.subnet(written_by)(piece[:, :first], use_cache=True).past_key_values
            view = switch(supernet, cache, spec, allow_approximate=True)
            logits = view(given, past_key_values=cache, use_cache=True).logits
        loss += float(F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"))
        right += int((logits.argmax(-1) == wanted).sum())
        seen += wanted.numel()
    return loss / seen, 100 * right / seen
