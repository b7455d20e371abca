"""Folders with every size of a model, as files that others load.

- `folder.py`: what a bundle stores; `from_pretrained`, and the work of `Supernet.save_pretrained`.
- `factories.py`: which networks a bundle may name.
- `cut_out.py`: one subnet as a model of its library's own class.
- `card.py`: the model card of a bundle, or of a cut-out.
- `hub.py`: a bundle at the hub of Hugging Face.
- `keyword.py`: a subnet as a model of a class of transformers.
- `images.py`: the accuracy of every subnet on a folder of images.
- `language_model.py`: a subnet for lm-eval.
"""

from subnetact.elastic.folder import from_pretrained

__all__ = ["from_pretrained"]
