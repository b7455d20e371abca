"""A subnet of a bundle in other libraries, each in a fresh process, equals the library alone on its cut-out.

Every row of the table is run twice: with this package, which opens the subnet of the bundle, and without it,
where the library opens the folder that has this subnet alone.
"""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from subnetact import insert_

pytest.importorskip("transformers")

from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from subnetact.errors import SpecError
from subnetact.generation.text import DATA, END

TEXTS = ["Return the number of bytes.", "a file", "Open a file and read all of its lines."]
TOLERANCE = 1e-5
ANSWERS: dict[tuple[str, str], torch.Tensor] = {}


@dataclass(frozen=True)
class Row:
    """One use of a library: with this package on a bundle, and without it on the cut-out."""

    needs: tuple[str, ...]
    model: str
    ours: str
    alone: str


def of_bert(options: str, name: str = "folder", first: str = "", needs: str = "transformers") -> Row:
    ours = first + TRANSFORMERS.format(options=options).replace("name", name)
    return Row((needs,), "bert", ours, TRANSFORMERS.format(options="").replace("name", "folder"))


TRANSFORMERS = """
    from transformers import AutoModel, AutoTokenizer
    tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    model = AutoModel.from_pretrained(name{options}).eval()
    found = model(tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
"""
PUSHED = """
    import shutil
    from unittest import mock
    import huggingface_hub
    hub, commits = folder + "-at-the-hub", []
    class Api:
        def __init__(self, token): assert token == "secret"
        def create_repo(self, name, private, exist_ok):
            return mock.Mock(repo_id=name)
        def upload_folder(self, folder_path, **commit):
            commits.append(commit)
            shutil.copytree(folder_path, hub)
    supernet = subnetact.from_pretrained(folder)
    with mock.patch.object(huggingface_hub, "HfApi", Api):
        supernet.push_to_hub("me/model", token="secret", licence="mit")
    assert [(each["repo_id"], each["create_pr"]) for each in commits] == [("me/model", False)]
    card = huggingface_hub.ModelCard.load(hub + "/README.md").data
    assert (card.library_name, card.license, card.tags) == ("subnetact", "mit", ["elastic", "transformers"])
    def snapshot_download(name, **_):
        return {"me/model": hub}[name]
    huggingface_hub.snapshot_download = snapshot_download
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(folder)
"""
ENCODED = """
    from sentence_transformers import SentenceTransformer
    model = SentenceTransformer(folder{options}, truncate_dim=24)
    found = model.encode(texts, convert_to_tensor=True)
    assert found.shape[1] == 24
"""
TRAINED = """
    import shutil
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
    from subnetact.training import SandwichTraining
    class Trainer(SandwichTraining, SentenceTransformerTrainer): pass
    supernet, model = subnetact.from_pretrained(folder), SentenceTransformer(folder)
    model[0].model = supernet.network
    half, x = supernet.card.subnets["half"], torch.arange(8)[None]
    before = supernet.subnet(half)(x).last_hidden_state.clone()
    rows = Dataset.from_dict({"anchor": texts * 2, "positive": texts[::-1] * 2})
    options = SentenceTransformerTrainingArguments(
        folder + "-training", num_train_epochs=1, per_device_train_batch_size=3, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no", seed=0)
    loss = MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), [32, 16])
    given = dict(model=model, args=options, train_dataset=rows, loss=loss)
    try:
        Trainer(**given).train()
    except subnetact.errors.TrainingError as error:
        assert "give distillation=0.0" in str(error)
    else:
        raise AssertionError("losses of this library return no outputs")
    trainer = Trainer(**given, distillation=0.0)
    trainer.train()
    assert trainer.state.global_step == 2
    assert not torch.equal(supernet.subnet(half)(x).last_hidden_state, before)
    supernet.save_pretrained(folder)  # a bundle again, into which the other modules are put
    model.save(folder)
    supernet.save_pretrained(folder)
    shutil.rmtree(alone)
    supernet.save_pretrained(alone, only="half", example=x)
    model.tokenizer.save_pretrained(alone)
    found = SentenceTransformer(folder, model_kwargs={"subnet": "half"}).encode(texts, convert_to_tensor=True)
"""
LIKELIHOODS = """
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    asked = [Instance("loglikelihood", {}, (texts[0], text), 0) for text in texts[1:]]
    model = {model}
    found = torch.tensor([likely for likely, _ in model.loglikelihood(asked, disable_tqdm=True)])
"""
TASK = """
    import json, lm_eval
    from pathlib import Path
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    place = Path(folder + "-task")
    place.mkdir(exist_ok=True)
    place.joinpath("data.jsonl").write_text("\\n".join(json.dumps({"text": text}) for text in texts))
    task = {
        "task": "local", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(place / "data.jsonl")}}, "doc_to_text": "{{text}}",
        "doc_to_choice": ["bytes", "lines"], "doc_to_target": 0, "metric_list": [{"metric": "acc"}]}
    place.joinpath("local.yaml").write_text(json.dumps(task))  # JSON is YAML.
    tasks = TaskManager(include_path=str(place), include_defaults=False)
    options = dict(tasks=["local"], device="cpu", bootstrap_iters=0, task_manager=tasks)
    samples = lm_eval.simple_evaluate(**MODEL, **options)["samples"]["local"]
    found = torch.tensor([float(likely) for sample in samples for ((likely, _),) in sample["resps"]])
"""
SUBNET = """
    from transformers import AutoTokenizer
    supernet = subnetact.from_pretrained(folder)
    tokenizer, view = AutoTokenizer.from_pretrained(folder), supernet.subnet(supernet.card.subnets["half"])
"""
ALONE_TASK = TASK.replace("**MODEL", 'model="hf", model_args={"pretrained": folder}')
ALONE_LIKELIHOODS = LIKELIHOODS.replace("{model}", 'HFLM(pretrained=folder, device="cpu")')
FIRST = "    from transformers import PreTrainedModel\n    import subnetact\n"
TABLE = {
    "transformers": of_bert(', subnet="half"'),
    "transformers, imported first": of_bert(', subnet="half", dtype="float32"', first=FIRST),
    "huggingface_hub": of_bert(', config=config, subnet="half"', '"me/model"', PUSHED, "huggingface_hub"),
    "sentence-transformers": Row(
        ("sentence_transformers",),
        "bert",
        ENCODED.format(options=', model_kwargs={"subnet": "half"}'),
        ENCODED.format(options=""),
    ),
    "trainer of sentence-transformers": Row(
        ("sentence_transformers", "datasets", "accelerate"),
        "bert",
        TRAINED,
        ENCODED.format(options="").replace(", truncate_dim=24", "").replace("24", "32"),
    ),
    "lm-eval, a view": Row(
        ("lm_eval",),
        "llama",
        SUBNET + LIKELIHOODS.replace("{model}", 'HFLM(pretrained=view, tokenizer=tokenizer, device="cpu")'),
        ALONE_LIKELIHOODS,
    ),
    "lm-eval, a task": Row(
        ("lm_eval", "datasets"),
        "llama",
        SUBNET + TASK.replace("**MODEL", "model=HFLM(pretrained=view, tokenizer=tokenizer)"),
        ALONE_TASK,
    ),
    "lm-eval, hf": Row(
        ("lm_eval", "datasets"),
        "llama",
        TASK.replace("**MODEL", 'model="hf", model_args={"pretrained": folder, "subnet": "half"}'),
        ALONE_TASK,
    ),
    "lm-eval, the plug-in": Row(
        ("lm_eval", "datasets"),
        "llama",
        "    import subnetact.elastic.language_model\n"
        + TASK.replace("**MODEL", 'model="subnetact", model_args={"path": folder, "subnet": "half"}'),
        ALONE_TASK,
    ),
}


def run(text: str, folder: Path, other: Path, ours: bool) -> torch.Tensor:
    """Run a script in a process of its own, and return what it found."""
    file = folder.parent / "found.pt"
    begin = "import subnetact\n" if ours and "import subnetact" not in text else ""
    end = "" if ours else "import sys; assert 'subnetact' not in sys.modules\n"
    given = f"folder, alone, texts = {str(folder)!r}, {str(other)!r}, {TEXTS!r}\n"
    script = f"import torch\n{begin}{given}{dedent(text)}\n{end}torch.save(found.detach(), {str(file)!r})"
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder.parent)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.returncode, done.stderr[-3000:]
    return torch.load(file)


def saved(model: Any, folder: Path) -> tuple[Path, Path]:
    """Write a bundle with a subnet that is called half, and this subnet alone, both with a tokenizer."""
    x = torch.randint(5, 99, (2, 8))
    supernet = insert_(model, example={"input_ids": x}, axes=("depth", "ffn"), choices=(0.5, 1.0))
    supernet.save_pretrained(folder / "bundle", subnets={"half": supernet.space.smallest()})
    supernet.save_pretrained(folder / "alone", only=supernet.space.smallest(), example={"input_ids": x})
    file = str(DATA / "text_tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token=END, bos_token=END, pad_token=END)
    for name in ("bundle", "alone"):
        tokenizer.save_pretrained(folder / name)
    return folder / "bundle", folder / "alone"


@pytest.mark.heavy
@pytest.mark.parametrize("name", TABLE)
def test_a_subnet_is_in_another_library_what_its_cut_out_is(name: str, tmp_path: Path) -> None:
    row = TABLE[name]
    if lacking := [package for package in row.needs if find_spec(package) is None]:
        pytest.skip(f"needs {', '.join(lacking)}")
    words = PreTrainedTokenizerFast(tokenizer_file=str(DATA / "text_tokenizer.json")).vocab_size
    sizes: Any = {"vocab_size": words, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 128}
    made = {
        "bert": lambda: BertModel(BertConfig(**sizes)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
    }
    bundle, alone = saved(made[row.model]().eval(), tmp_path)
    ours = run(row.ours, bundle, alone, True)
    if (row.model, row.alone) not in ANSWERS:  # All bundles of a model are of the same seed.
        ANSWERS[row.model, row.alone] = run(row.alone, alone, bundle, False)
    torch.testing.assert_close(ours, ANSWERS[row.model, row.alone], rtol=0, atol=TOLERANCE)
    assert ours.std() > 0


def test_what_a_bundle_cannot_follow_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BertForMaskedLM

    sizes: Any = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    network = BertForMaskedLM(BertConfig(**sizes, num_attention_heads=4)).eval()
    x = torch.randint(5, 99, (2, 8))
    supernet = insert_(network, example={"input_ids": x}, axes=("ffn",), choices=(0.5, 1.0))
    supernet.save_pretrained(tmp_path / "bundle", subnets={"half": supernet.space.smallest()})
    bundle: Any = tmp_path / "bundle"
    half = BertModel.from_pretrained(bundle, subnet="half", dtype=torch.float64)
    assert half.dtype == torch.float64
    assert half.encoder.layer[0].intermediate.dense.out_features == 32, "the base of the class in the bundle"
    with pytest.raises(SpecError, match=r"follow \['quantization_config'\]; it follows attn_implementation"):
        BertModel.from_pretrained(bundle, subnet="half", quantization_config=object())
    with pytest.raises(SpecError, match="is of a BertForMaskedLM, not of a BertLMHeadModel; open it as"):
        AutoModelForCausalLM.from_pretrained(bundle, subnet="half")
    with pytest.raises(SpecError, match="no subnet is called 'tiny'"):
        BertModel.from_pretrained(bundle, subnet="tiny")
    with pytest.raises(TypeError, match="unexpected keyword"):
        BertModel.from_pretrained(bundle, subset="half")


def test_the_entry_point_of_lm_eval_is_the_model() -> None:
    pytest.importorskip("lm_eval")
    from subnetact.elastic.language_model import ElasticLM

    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    name, _, value = setup["options.entry_points"]["lm_eval.models"].strip().partition(" = ")
    assert name == "subnetact"
    assert EntryPoint(name, value, "lm_eval.models").load() is ElasticLM
