"""Folders with every size of a model, as files that others load.

- `folder.py`: what a bundle stores; `from_pretrained`, and the work of `Supernet.save_pretrained`.
- `factories.py`: which networks a bundle may name.
- `cut_out.py`: one subnet as a model of its library's own class.
- `auto_classes.py`: cut-outs whose layers differ in size, for the Auto classes of transformers.
- `card.py`: the model card of a bundle, or of a cut-out.
- `hub.py`: a bundle at the hub of Hugging Face.
- `in_transformers.py`: what `import subnetact` adds to transformers: the keyword `subnet`, and a model type.
- `opened_subnet.py`: what that keyword opens.
- `language_model.py`: a subnet for lm-eval.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subnetact.elastic.folder import from_pretrained

__all__ = ["from_pretrained"]


def __getattr__(name: str) -> Any:
    if name != "from_pretrained":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from subnetact.elastic.folder import from_pretrained

    return from_pretrained
