"""AIPerf, the field's generator of load, measures the text server without an error."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from subnetact.generation.text import END, text_tokenizer

AIPERF = os.environ.get("SUBNETACT_AIPERF_ENV", "")


@pytest.mark.skipif(not AIPERF, reason="needs an environment with AIPerf: SUBNETACT_AIPERF_ENV=DIR")
def test_aiperf_gets_every_answer_with_as_many_tokens_as_it_asked_for(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    served = start("--text", "--slo-ms", "60000")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=text_tokenizer(), eos_token=END)
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    options = (
        "profile --model docstrings --endpoint-type completions --streaming --tokenizer ./tokenizer --ui none"
    )
    options += " --request-count 12 --concurrency 4 --synthetic-input-tokens-mean 24 --output-tokens-mean 6"
    options += " --extra-inputs ignore_eos:true --extra-inputs min_tokens:6"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [f"{AIPERF}/bin/aiperf", *options.split(), "--url", served.url]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=150, capture_output=True)
    (found,) = tmp_path.rglob("profile_export_aiperf.json")
    facts = json.loads(found.read_text())
    assert facts["request_count"]["avg"] == 12
    assert facts.get("error_request_count", {"avg": 0})["avg"] == 0
    assert facts["output_sequence_length"]["avg"] == pytest.approx(6, abs=1)
