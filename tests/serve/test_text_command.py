"""`python -m subnetact.serve --text`, asked by OpenAI's own client until it is told to end."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("starlette", reason="serving needs the extra `serve`")
pytest.importorskip("uvicorn", reason="serving needs the extra `serve`")

from subnetact.generation.text import text_facts

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.heavy

TOKEN = "a-token-of-the-tests"
PROMPT = ">>> help(json.dumps)\n"


@pytest.fixture(scope="module")
def served(start: Callable[..., Any]) -> Any:
    """The command on a free port, with a token, and time to finish after SIGTERM."""
    environment = {"SUBNETACT_TOKEN": TOKEN}
    return start("--text", "--slo-ms", "60000", "--grace-s", "1", environment=environment)


@pytest.fixture(scope="module")
def client(served: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=TOKEN, max_retries=0, timeout=60) as found:
        yield found


def largest() -> str:
    """Return the accuracy that only the largest subnet has, as a header."""
    return str(max(one["right_percent"] for one in text_facts()["held_out"]))


def expected(prompt: str, count: int) -> str:
    import torch

    from subnetact.generation.text import load_text_supernet
    from subnetact.serve.text_codec import prompt_tokenizer

    supernet = load_text_supernet()
    view: Any = supernet.subnet(supernet.space.largest())
    given = torch.tensor([prompt_tokenizer().encode(prompt).ids])
    tokens = view.generate(given, max_new_tokens=count, do_sample=False)[0, given.shape[1] :].tolist()
    return prompt_tokenizer().decode(tokens[: tokens.index(0)] if 0 in tokens else tokens)


def test_openais_client_is_answered_by_the_embedded_model(client: Any) -> None:
    best = {"x-min-accuracy": largest()}
    facts = {"model": "docstrings", "prompt": PROMPT, "max_tokens": 24, "extra_headers": best}
    whole, pieces = client.completions.create(**facts), list(client.completions.create(**facts, stream=True))
    assert whole.choices[0].text == expected(PROMPT, 24)
    assert whole.usage.completion_tokens <= 24
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert len(pieces) > 3
    assert [model.id for model in client.models.list()] == ["docstrings"]
    chat = client.chat.completions.create(
        model="docstrings",
        messages=[{"role": "user", "content": PROMPT}],
        max_completion_tokens=24,
        extra_headers={**best, "x-deadline-ms": "3000000"},
    )
    assert chat.choices[0].message.content == expected(f"user: {PROMPT}\nassistant:", 24)


def test_the_blocks_of_the_page_about_this_client_run(client: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "openai.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        local = block.replace('base_url="http://localhost:8000/v1", api_key="none"', "**server")
        names["server"] = {"base_url": client.base_url, "api_key": client.api_key}
        exec(compile(local, "docs/howto/openai.md", "exec"), names)
    assert names["answer"].choices[0].text
    names["client"].close()


def test_sigterm_lets_a_stream_end(client: Any, served: Any) -> None:
    facts = {"model": "docstrings", "prompt": PROMPT, "max_tokens": 100, "temperature": 1.5}
    stream = client.completions.create(**facts, stream=True)
    next(stream)
    served.process.send_signal(signal.SIGTERM)
    *_, last = stream
    assert last.choices[0].finish_reason in ("stop", "length")
    assert served.process.wait(60) in (0, -signal.SIGTERM)
    assert served.stop() == ""
