"""The load test against a server, as a user runs both."""

from __future__ import annotations

import json

import numpy as np
import pytest

from subnetact.loadtest.cli import main


@pytest.mark.parametrize("body", ["npy", "json"])
def test_the_command_reports_what_came_of_a_trace(server, tmp_path, capsys, body, images):
    np.save(tmp_path / "inputs.npy", images.numpy())
    np.save(tmp_path / "labels.npy", np.zeros(len(images), int))
    out = tmp_path / "report.json"
    options = f"--trace servegen --rate 120 --seconds 0.5 --slo-ms 60000 --body {body} --out {out}"
    files = ["--inputs", str(tmp_path / "inputs.npy"), "--labels", str(tmp_path / "labels.npy")]
    assert main([server.url, *options.split(), *files]) == 0
    report = json.loads(out.read_text())
    assert report["outcomes"] == {"met": report["requests"]}
    assert report["requests"] > 20
    assert report["attainment"] == 1.0
    assert report["measured_accuracy"] == report["effective_accuracy"]
    assert report["latency_ms"]["p50"] <= report["latency_ms"]["p99"]
    assert "answered in time    100.00 %" in capsys.readouterr().out


def test_digits_come_with_their_labels(server, tmp_path):
    pytest.importorskip("sklearn")
    out = tmp_path / "report.json"
    options = f"--trace poisson --rate 120 --seconds 0.5 --slo-ms 60000 --min-accuracy 82 --out {out}"
    assert main([server.url, *options.split()]) == 0
    report = json.loads(out.read_text())
    assert set(report["subnets"]) == {"2"}
    assert report["measured_accuracy"] > 20  # statistics of noise still tell some digits apart
