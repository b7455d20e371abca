"""lm-eval measures a subnet of a bundle: likelihoods are those of the subnet."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lm_eval")


def test_every_size_is_measured(tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model
    from transformers import PreTrainedTokenizerFast

    from subnetact.elastic.language_model import ElasticLM
    from subnetact.generation.text import DATA, END, load_text_supernet

    supernet = load_text_supernet()
    space = supernet.space
    supernet.save_pretrained(tmp_path, subnets={"small": space.smallest(), "large": space.largest()})
    file = str(DATA / "text_tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=file, eos_token=END, bos_token=END).save_pretrained(tmp_path)
    assert get_model("subnetact") is ElasticLM
    asked = [Instance("loglikelihood", {}, ("Return the ", "number of bytes"), 0)]
    found = {}
    for name in ("small", "large"):
        model = ElasticLM(str(tmp_path), subnet=name, device="cpu", batch_size=1)
        found[name] = model.loglikelihood(asked, disable_tqdm=True)[0][0]
    assert found["small"] < found["large"] < 0
