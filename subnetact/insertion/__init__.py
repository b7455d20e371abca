"""Make an ordinary model elastic: find out what can be, describe it, try it on copies, insert the operators.

Which file answers which question:

- `insert.py`: `describe` and `insert_`; which models are refused at once.
- `description.py`: what was found, whatever the source: `Group`, `Member`, `DepthStage`, `Description`.
- `recorder.py`: the graph of what a model computes on an example; `analysis.py`: which groups it shows, and
  why others are refused; `relations.py`: which entries of its tensors go together; `function_trial.py`: what
  a function does, found by calling it.
- `declaration.py`: which numbers a transformer states of its heads and neurons, tried block by block.
- `fold.py`: `fold_`, which makes weight norms and the like permanent.
- `skippable.py`: blocks that a subnet may skip, and their importance.
- `reorder.py`: `reorder_`, which sorts channels, heads and neurons; `importance.py`: the scores; `units.py`:
  which weights have to move together, and in which units.
- `description_proof.py`: what is tried on copies before the model is touched.
- `layer_vocabulary.py`: subnets of language models as `per_layer_config` of transformers.
- `key_value_cache.py`: which subnet may continue on the key-value cache of another one, and what skipped
  layers write into it; `cache_rules.py`: on which sizes of a subnet its keys and values depend.
- `hugging_face.py`: an extracted subnet of a Hugging Face model as a model that `from_pretrained` loads.
"""

from subnetact.insertion.description import DepthStage, Description, Group, Member
from subnetact.insertion.fold import fold_
from subnetact.insertion.hugging_face import as_pretrained, heterogeneous
from subnetact.insertion.importance import ChannelGroup, UnitWeights
from subnetact.insertion.key_value_cache import cache_relation, switch
from subnetact.insertion.reorder import ReorderReport

__all__ = [
    "ChannelGroup",
    "DepthStage",
    "Description",
    "Group",
    "Member",
    "ReorderReport",
    "UnitWeights",
    "as_pretrained",
    "cache_relation",
    "fold_",
    "heterogeneous",
    "switch",
]
