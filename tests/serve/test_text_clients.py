"""The bundle of a language model, served by the command to the clients that others wrote for such servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("starlette", reason="serving needs the extra `serve`")
pytest.importorskip("uvicorn", reason="serving needs the extra `serve`")

from subnetact import Engine
from subnetact.generation import profile_steps
from subnetact.generation.text import DATA, END, load_text_supernet, switchable_subnets
from subnetact.serve.cli import main

pytestmark = pytest.mark.heavy
PROMPTS = [">>> help(json.dumps)\n", ">>> help(re.sub)\n"]
TOKENS = 12


def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(DATA / "text_tokenizer.json"), bos_token=END, eos_token=END
    )


@pytest.fixture(scope="module")
def engine() -> Engine:
    """An engine of two subnets, with their step table."""
    supernet = load_text_supernet()
    specs = [switchable_subnets(supernet)[i] for i in (0, -1)]
    sizes: Any = {"sequences": (1, 4), "contexts": (64,), "prompt_tokens": (8, 64), "rounds": 1}
    table = profile_steps(supernet, specs, **sizes, accuracy=[30.0, 40.0], progress=False)
    engine = Engine(supernet, specs, accuracy=[30.0, 40.0])
    engine.tables.update(table.to_tables())
    return engine


@pytest.fixture(scope="module")
def bundle(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a tokenizer; it is saved again, which leaves the tokenizer where it is."""
    folder = tmp_path_factory.mktemp("text") / "docs"
    engine.save(folder)
    tokenizer().save_pretrained(folder)
    engine.save(folder)
    return folder


@pytest.fixture(scope="module")
def url(start: Callable[..., Any], bundle: Path) -> str:
    return f"{start('--bundle', str(bundle), '--text', '--slo-ms', '60000').url}/v1"


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Callable[[str], str]:
    import torch

    def continued(prompt: str) -> str:
        tokens, view = tokenizer(), engine.supernet.subnet(engine.specs[1])
        given = torch.tensor([tokens.encode(prompt)])
        answer = view.generate(given, max_new_tokens=TOKENS, do_sample=False)[0, given.shape[1] :]
        return str(tokens.decode(answer, skip_special_tokens=True))

    return continued


def test_the_client_of_hugging_face_reads_whole_chats_and_streams(
    url: str, expected: Callable[[str], str]
) -> None:
    inference = pytest.importorskip("huggingface_hub").InferenceClient
    client = inference(base_url=url, api_key="none", timeout=60, headers={"x-min-accuracy": "40"})
    wanted = expected("user: a\nassistant:")
    asked = {"messages": [{"role": "user", "content": "a"}], "model": "docs", "max_tokens": TOKENS, "seed": 1}
    assert client.chat_completion(**asked).choices[0].message.content == wanted
    usage = {"include_usage": True}
    *pieces, last = client.chat_completion(**asked, stream=True, stream_options=usage)
    assert "".join(piece.choices[0].delta.content for piece in pieces) == wanted
    assert (len(last.choices), last.usage.completion_tokens) == (0, TOKENS)


@pytest.mark.parametrize(
    ("name", "address", "tokenizer"),
    [
        ("local-completions", "completions", None),
        ("local-completions", "completions", "huggingface"),  # its prompts are lists of tokens
        ("local-chat-completions", "chat/completions", None),
    ],
)
def test_lm_eval_runs_a_local_task_at_the_server(
    name: str, address: str, tokenizer: str | None, url: str, bundle: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tenacity", reason="the models of lm_eval for servers need lm_eval[api]")
    pytest.importorskip("aiohttp", reason="the models of lm_eval for servers need lm_eval[api]")
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    lines = [{"text": prompt} for prompt in PROMPTS * 2]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    task = {
        **{"task": "local", "dataset_path": "json", "test_split": "test", "output_type": "generate_until"},
        **{"dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}}},
        **{"doc_to_text": "{{text}}", "doc_to_target": "", "metadata": {"version": 1}},
        **{"generation_kwargs": {"until": ["\n\n\n\n"], "max_gen_toks": TOKENS, "do_sample": False}},
        **{"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]},
    }
    (tmp_path / "local.yaml").write_text(json.dumps(task))  # JSON is YAML.
    results = lm_eval.simple_evaluate(
        model=name,
        model_args={
            **{"model": "docs", "base_url": f"{url}/{address}", "max_retries": 1},
            **{"tokenizer_backend": tokenizer, "tokenizer": str(bundle) if tokenizer else None},
        },
        tasks=["local"],
        batch_size=1 if "chat" in name else 2,
        apply_chat_template="chat" in name,
        bootstrap_iters=0,
        log_samples=True,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )
    answers = [one["resps"][0][0] for one in results["samples"]["local"]]
    assert len(answers) == 4
    assert all(answers)
    assert answers[:2] == answers[2:]


def test_what_cannot_be_served_as_a_language_model_is_refused(
    engine: Engine, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.save(tmp_path / "one")
    Engine(engine.supernet, engine.specs, accuracy=engine.accuracy).save(tmp_path / "two")
    tokenizer().save_pretrained(tmp_path / "two")
    for options, words in (
        ([], "give --bundle"),
        (["--demo", "--text"], "give --bundle"),
        (["--text", "--model", "a:b"], "--model: it does not apply"),
        (["--text", "--bundle", bundle, "--workers", "2"], "--workers: it does not apply"),
        (["--text", "--policy", "slackfit:4"], "--policy: it does not apply to --text"),
        (["--text", "--table", "t.json"], "--table: it does not apply to --text"),
        (["--text", "--bundle", tmp_path / "one"], "tokenizer.save_pretrained"),
        (["--text", "--bundle", tmp_path / "two"], "profile_steps"),
    ):
        assert main([str(option) for option in options]) == 2
        assert words in capsys.readouterr().err
