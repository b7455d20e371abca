"""What `from_pretrained(folder, subnet="small")` of a class of transformers does with a bundle.

Whatever hands its options on to that method opens subnets, too: `model_kwargs={"subnet": "small"}` of
`SentenceTransformer` and of `transformers.pipeline`, for example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subnetact.elastic.folder import from_pretrained
from subnetact.elastic.hub import HUB_OPTIONS, downloaded
from subnetact.errors import SpecError
from subnetact.files.tensors import named_dtype

TAKEN = ("attn_implementation", "device_map", "dtype", "torch_dtype")
"""Options that a bundle follows, beside those of the hub."""
MEANINGLESS = (
    "adapter_kwargs", "config", "generation_config", "trust_remote_code", "use_safetensors", "weights_only",
)  # fmt: skip
"""Options that change nothing: a bundle has its own configuration, and runs no code."""


def open_subnet(cls: Any, folder: Any, subnet: Any, options: Mapping[str, Any]) -> Any:
    """Return a subnet of a bundle as a model of a class of transformers: a view, as of `Supernet.subnet`.

    Args:
        cls: the class that is asked for: that of the model in the bundle, or its base, as `BertModel` is that
            of `BertForMaskedLM`.
        folder: the bundle, or its name at the hub.
        subnet: as of `subnetact.from_pretrained`.
        options: the other arguments of `from_pretrained` of the class.

    Raises:
        SpecError: the model is of another class, or an option is not one that a bundle can follow.
    """
    given = {name for name, value in options.items() if value and not name.startswith("_")}
    if wrong := sorted(given.difference(TAKEN, HUB_OPTIONS, MEANINGLESS)):
        raise SpecError(f"subnet={subnet!r}: a bundle cannot follow {wrong}; it follows {', '.join(TAKEN)}")
    hub = {name: value for name, value in options.items() if name in HUB_OPTIONS}
    supernet: Any = from_pretrained(downloaded(folder, hub))
    dtype, device = options.get("dtype", options.get("torch_dtype")), options.get("device_map")
    if dtype not in (None, "auto"):
        supernet.to(named_dtype(dtype) if isinstance(dtype, str) else dtype)
    if device is not None:
        supernet.to(device[""] if isinstance(device, Mapping) and set(device) == {""} else device)
    if "attn_implementation" in given:
        supernet.network.set_attn_implementation(options["attn_implementation"])
    view = supernet.subnet(supernet.card.find(supernet.space, subnet))
    for model in (view, getattr(view, "base_model", None)):
        if isinstance(model, cls):
            return model
    name = type(supernet.network).__name__
    raise SpecError(
        f"subnet={subnet!r}: the bundle is of a {name}, not of a {cls.__name__}; open it as {name}"
    )
