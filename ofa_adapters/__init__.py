"""Published supernet families as `subnetact` supernets, filled with real checkpoints.

* `families()` names the families and `load(family, checkpoint)` builds one.
* `identify(tensors)` tells the family of a state_dict.
* `encode(space, spec)` returns the features that the family's upstream accuracy predictor reads.
* `importance(supernet, batches)` and `rewire_(supernet, scores)` prepare a BERT that was only fine-tuned.

"Upstream" is the authors' original code, with its configurations, checkpoints and accuracy predictors.

Each module of `ofa_adapters.networks` holds one family: the network, the sizes that its choices mean, what is
elastic, and how upstream's names map to ours. Errors are those of `subnetact.errors`.
"""

from ofa_adapters.features import Features
from ofa_adapters.registry import encode, families, identify, load
from ofa_adapters.rewire import Importance, importance, rewire_

__all__ = [
    "Features",
    "Importance",
    "encode",
    "families",
    "identify",
    "importance",
    "load",
    "rewire_",
]
