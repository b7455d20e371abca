"""The OpenAPI document, and requests that a machine makes from it: none of them may break the server."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_requests_made_from_the_document_find_no_server_error(server, tmp_path):
    """Valid and invalid requests. 503 and 504 are answers."""
    pytest.importorskip("schemathesis")
    allowed = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 503, 504]\n'
    (tmp_path / "schemathesis.toml").write_text(allowed)
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    options = "--checks not_a_server_error --max-examples 60 --seed 1 --no-color"
    done = subprocess.run(
        [*command, *options.split(), "--request-timeout", "20"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) selected / (\d+) total", done.stdout)
    assert found is not None, done.stdout[-3000:]
    assert found[1] == found[2]
    assert int(found[1]) >= 14
    assert f"{found[1]} passed" in done.stdout, done.stdout[-3000:]
