"""Opens models whose layers differ in size with the Auto classes of transformers.

transformers refuses most of them (`insertion/hugging_face.py`), so their configurations have a model type of
their own. `import subnetact` registers it as soon as the Auto classes are imported; nothing in a folder runs.
"""

from __future__ import annotations

from typing import Any

from subnetact.insertion.hugging_face import LAYERED, LAYERS_OF, heterogeneous, layered


class LayeredConfig:
    """Reads configurations of the model type `LAYERED`, as those of the library's own type."""

    model_type = LAYERED

    @classmethod
    def from_dict(cls, stated: dict[str, Any], **options: Any) -> Any:
        """Return a configuration of which all Auto classes know the models that fit."""
        from transformers.models.auto import auto_factory, configuration_auto, modeling_auto

        named: Any = stated.get(LAYERS_OF)
        if named not in configuration_auto.CONFIG_MAPPING:
            raise ValueError(f"config.json: {LAYERS_OF} is {named!r:.60}, no model type of transformers")
        kind: Any = configuration_auto.CONFIG_MAPPING[named]
        base: Any = auto_factory._BaseAutoModelClass
        autos: Any = [a for a in vars(modeling_auto).values() if isinstance(a, type) and issubclass(a, base)]
        for auto in autos:
            mapping = auto._model_mapping or {}
            if kind in mapping and isinstance(model := mapping[kind], type):
                auto.register(layered(kind), heterogeneous(model), exist_ok=True)
        return layered(kind).from_dict({**stated, "model_type": named}, **options)


def register() -> None:
    """Let `AutoConfig` read configurations of the model type."""
    from transformers import AutoConfig

    reader: Any = LayeredConfig
    AutoConfig.register(LAYERED, reader, exist_ok=True)
