"""Programs of others that speak OpenAI's interface, unchanged, against the command; each where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="serving needs the extra `serve`")
pytest.importorskip("transformers")

PROMPTS = [">>> help(abs)", "Return the", "def "]
TOKENS = 6


@pytest.fixture(scope="module")
def url(start: Callable[..., Any], python_path: str) -> str:
    return str(start("--text", "--slo-ms", "60000", environment={"PYTHONPATH": python_path}).url)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_lm_eval_generates(url: str, path: str) -> None:
    pytest.importorskip("tenacity", reason="needs lm_eval[api]")
    models: Any = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance
    from lm_eval.models.api_models import JsonChatStr

    chats = path.startswith("chat")
    kind = models.LocalChatCompletion if chats else models.LocalCompletionsAPI
    more: Any = {} if chats else {"tokenizer_backend": None, "tokenized_requests": False, "batch_size": 3}
    model = kind(base_url=f"{url}/v1/{path}", model="docstrings", max_retries=1, **more)
    prompts: list[Any] = PROMPTS
    if chats:
        prompts = [JsonChatStr(json.dumps([{"role": "user", "content": prompt}])) for prompt in PROMPTS]
    how = {"until": ["no such text"], "max_gen_toks": TOKENS, "temperature": 0.0}
    asked = [Instance("generate_until", {}, (prompt, how), i) for i, prompt in enumerate(prompts)]
    answers = model.generate_until(asked)
    assert len(answers) == len(PROMPTS)
    assert all(isinstance(answer, str) and answer.strip() for answer in answers)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_measures(url: str, path: str, tmp_path: Path) -> None:
    if shutil.which("guidellm") is None:
        pytest.skip("needs guidellm")
    data, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    data.write_text(
        "".join(json.dumps({"prompt": one, "output_tokens_count": TOKENS}) + "\n" for one in PROMPTS)
    )
    backend = f"kind=openai_http,target={url},model=docstrings,request_format={path}"
    options = ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"]
    options += ["--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={report}"]
    subprocess.run(
        ["guidellm", "run", "--backend", backend, "--disable-console", *options], check=True, timeout=300
    )
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 3
    assert not benchmark["requests"]["errored"]
    assert [one["output_metrics"]["text_tokens"] for one in benchmark["requests"]["successful"]] == [
        TOKENS
    ] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_chats(url: str, stream: bool) -> None:
    litellm: Any = pytest.importorskip("litellm")
    answer = litellm.completion(
        model="openai/docstrings",
        api_base=f"{url}/v1",
        api_key="none",
        messages=[{"role": "user", "content": PROMPTS[0]}],
        max_tokens=TOKENS,
        stream=stream,
    )
    if stream:
        text = "".join(piece.choices[0].delta.content or "" for piece in answer)
    else:
        text = answer.choices[0].message.content
        assert answer.usage.completion_tokens == TOKENS
    assert text
