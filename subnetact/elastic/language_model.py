"""A subnet of a bundle for lm-eval, which importing this module registers as the model `subnetact`.

python -m subnetact.elastic.language_model --model subnetact --model_args path=FOLDER,subnet=small --tasks ...
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM


@register_model("subnetact")
class ElasticLM(HFLM):  # type: ignore[misc]
    """A subnet of a bundle of a language model; the tokenizer lies in the same folder, unless it is named.

    Args:
        path: the folder.
        subnet: the name of a subnet. If None, the largest.
        options: further arguments of lm-eval's `HFLM`, for example `tokenizer` and `batch_size`.
    """

    def __init__(self, path: str, subnet: str | None = None, **options: Any) -> None:
        super().__init__(pretrained=path, subnet=subnet, **options)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
