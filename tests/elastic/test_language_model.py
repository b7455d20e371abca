"""lm-eval measures a subnet of a bundle: likelihoods are those of the subnet."""

from __future__ import annotations

import configparser
import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")


from subnetact.elastic.language_model import ElasticLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import PreTrainedTokenizerFast

    from subnetact.generation.text import DATA, END, load_text_supernet

    path = tmp_path_factory.mktemp("folder")
    supernet = load_text_supernet()
    space = supernet.space
    supernet.save_pretrained(path, subnets={"small": space.smallest(), "large": space.largest()})
    file = str(DATA / "text_tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=file, eos_token=END, bos_token=END).save_pretrained(path)
    return path


def test_every_size_is_measured(folder: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    assert get_model("subnetact") is ElasticLM
    asked = [Instance("loglikelihood", {}, ("Return the ", "number of bytes"), 0)]
    found = {}
    for name in ("small", "large"):
        model = ElasticLM(str(folder), subnet=name, device="cpu", batch_size=1)
        found[name] = model.loglikelihood(asked, disable_tqdm=True)[0][0]
    assert found["small"] < found["large"] < 0


def test_lm_eval_finds_the_model_by_its_name_and_runs_a_local_task(folder: Path, tmp_path: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    lines = [{"text": "Return the ", "good": "number of bytes", "bad": "zq#x"}] * 4
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    task = {
        **{"task": "local", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"},
        **{"dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}}, "target_delimiter": ""},
        **{"doc_to_text": "{{text}}", "doc_to_choice": "{{[good, bad]}}", "doc_to_target": 0},
        **{"metric_list": [{"metric": "acc"}], "metadata": {"version": 1}},
    }
    (tmp_path / "local.yaml").write_text(json.dumps(task))  # JSON is YAML.
    results = lm_eval.simple_evaluate(
        model="subnetact",
        model_args=f"path={folder},subnet=large",
        tasks=["local"],
        device="cpu",
        batch_size=1,
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )
    assert results["results"]["local"]["acc,none"] == 1.0


def test_the_entry_point_is_the_model() -> None:
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    name, _, value = setup["options.entry_points"]["lm_eval.models"].strip().partition(" = ")
    assert name == "subnetact"
    assert EntryPoint(name, value, "lm_eval.models").load() is ElasticLM
