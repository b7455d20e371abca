"""Published supernet families as `subnetact` supernets, filled with real checkpoints.

* `families()` and `language_models()` name the families and `load(family, checkpoint)` builds one.
* `upstream_state_dict(supernet)` returns its weights for upstream's own code.
* `identify(tensors)` tells the family of a state_dict.
* `encode(space, spec)` returns the features that the family's upstream accuracy predictor reads.

"Upstream" is the authors' original code, with its configurations, checkpoints and accuracy predictors.

Each module of `ofa_adapters.networks` holds one family: the network, the sizes that its choices mean, what is
elastic, and how upstream's names map to ours. Errors are those of `subnetact.errors`.
"""

from ofa_adapters.features import Features
from ofa_adapters.registry import encode, families, identify, language_models, load, upstream_state_dict

__all__ = ["Features", "encode", "families", "identify", "language_models", "load", "upstream_state_dict"]
