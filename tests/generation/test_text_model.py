"""The embedded language model: its files belong together, and held-out text is predicted as they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

import subnetact
from subnetact.errors import FileFormatError, MissingFile
from subnetact.generation.text import (
    END_TOKEN,
    FFN,
    VOCABULARY,
    load_text_supernet,
    switchable_subnets,
    text_facts,
    text_tokenizer,
)
from subnetact.insertion.key_value_cache import cache_relation
from subnetact.supernet.supernet import Supernet

pytest.importorskip("transformers")
DATA = Path(subnetact.__file__).parent / "data"


EXAMPLES = DATA.parents[1] / "examples"
training: Any = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "train_text_supernet.py")))
next_token_quality, read_text, tokens = training.next_token_quality, training.read_text, training.tokens


@pytest.fixture(scope="module")
def supernet() -> Supernet:
    return load_text_supernet()


@pytest.fixture(scope="module")
def held_out() -> torch.Tensor:
    """Return the first held-out texts of the running Python."""
    return tokens(read_text(held_out=True)[:150])


def test_the_files_are_small_and_tell_the_same_of_their_origin() -> None:
    sizes = [(DATA / name).stat().st_size for name in ("text_supernet.safetensors", "text_tokenizer.json")]
    assert sum(sizes) <= 6_000_000
    text, facts = (DATA / "text_supernet.md").read_text(), text_facts()
    rows = re.findall(r"^\| `(.+)` \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    told = [(one["subnet"], f"{one['loss']:.3f}", f"{one['right_percent']:.1f}") for one in facts["held_out"]]
    assert rows == told
    assert len(rows) == 15
    for words in ("train_text_supernet.py", "docstrings", "Python Software Foundation License"):
        assert words in " ".join(text.split())
    for name in ("steps", "seed", "seconds"):
        assert str(facts[name]) in text.replace(",", ""), name


def test_a_damaged_file_of_weights_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    whole = load_file(DATA / "text_supernet.safetensors")
    name, embedding = "model.embed_tokens.weight", whole["model.embed_tokens.weight"]
    for hostile in (
        b"",
        save({n: t for n, t in whole.items() if n != name}),
        save({**whole, name: embedding * float("nan")}),
    ):
        path.write_bytes(hostile)
        with pytest.raises(FileFormatError):
            load_text_supernet(path)
    with pytest.raises(MissingFile):
        load_text_supernet(tmp_path / "no.safetensors")
    with pytest.raises(FileFormatError):
        load_text_supernet(tmp_path)


def test_a_subnet_of_every_axis_reaches_the_told_loss_on_held_out_text(
    supernet: Supernet, held_out: torch.Tensor
) -> None:
    space = supernet.space
    told = {one["subnet"]: one for one in text_facts()["held_out"]}
    assert set(told) == {space.spec(depth=[kept], ffn=[width] * 4).key for kept in (2, 3, 4) for width in FFN}
    sample = text_facts()["sample"]
    stream = held_out[: sample["tokens"]]
    found = {}
    for spec in (space.largest(), space.smallest()):
        loss, right = found[spec] = next_token_quality(supernet, spec, stream)
        whole = told[spec.key]
        assert loss == pytest.approx(sample["loss"][spec.key], abs=0.15)  # other docstrings of other Pythons
        assert loss == pytest.approx(whole["loss"], abs=0.4)  # a sample
        assert right == pytest.approx(whole["right_percent"], abs=6.0)
    assert found[space.largest()][0] < found[space.smallest()][0] - 0.1


def test_the_wider_the_better_on_own_caches_and_on_others(supernet: Supernet, held_out: torch.Tensor) -> None:
    subnets = switchable_subnets(supernet)
    smallest, largest = subnets[0], subnets[-1]
    assert cache_relation(supernet, smallest, largest) == "approximate"
    stream = held_out[: 257 * 24]
    own = {
        spec: next_token_quality(supernet, spec, stream, written_by=spec)[0] for spec in (smallest, largest)
    }
    mixed = next_token_quality(supernet, largest, stream, written_by=smallest)[0]
    assert own[largest] < mixed < own[smallest], "continuing on another cache costs less than it gains"


def test_texts_and_tokens_are_inverse() -> None:
    tokenizer = text_tokenizer()
    assert tokenizer.get_vocab_size() == VOCABULARY
    text = "Return the größte of x, and ask >>> help(json.dumps)\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("<|end|>") == END_TOKEN == 0
    assert tokens(["a", "b"]).tolist().count(END_TOKEN) == 2


def test_no_text_is_both_trained_on_and_held_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for i in range(60):
        (tmp_path / f"module{i}.py").write_text(f'def f{i}():\n    """{"word " * 10}{i}"""\n')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "hidden.py").write_text(
        '"""A docstring of a folder that is not read, in a sentence."""'
    )
    (tmp_path / "broken.py").write_text("def (")
    monkeypatch.setattr(training.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    held_out, trained = read_text(held_out=True), read_text(held_out=False)
    assert len(held_out) + len(trained) == 60
    assert 0 < len(held_out) < 20
    assert not set(held_out) & set(trained)
    assert trained[0].startswith(">>> help(module")


def test_a_view_that_drafts_for_another_changes_no_token() -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "language_models.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (block,) = (one for one in blocks if "assistant_model" in one)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(block, page.name, "exec"), names)
    small, calls, options = names["small"], list[int](), {"max_new_tokens": 32, "do_sample": False}
    small.register_forward_hook(lambda *_: calls.append(1))
    drafted = names["large"].generate(names["prompt"], assistant_model=small, **options)
    assert calls, "the small view proposed tokens"
    assert torch.equal(drafted, names["drafted"])
