"""The rules and the dashboard of examples/monitoring read what a server exports, and their alerts fire."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "monitoring"
RULES = (EXAMPLES / "rules.yaml").read_text()
PANELS = json.loads((EXAMPLES / "dashboard.json").read_text())["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
PAGES = [
    ROOT / "docs" / "howto" / page for page in ("serve.md", "monitor.md", "troubleshooting.md", "tune.md")
]
OF_PROMETHEUS = {"job", "instance", "alertname", "alertstate", "le"}
VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "$instance": ".*"}
UNSEEN = {"subnetact_drifted", "subnetact_batch_limit"}
"""Metrics by subnet that a healthy server has no sample of."""
needs_prometheus = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool and prometheus")


def filled(query):
    """A query of the dashboard with values in place of Grafana's variables."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return query


def written():
    """Every file with queries, and its text."""
    yield "rules.yaml", "\n".join(line for line in RULES.splitlines() if not line.lstrip().startswith("#"))
    yield "rules_test.yaml", (EXAMPLES / "rules_test.yaml").read_text()
    yield "dashboard.json", "\n".join(QUERIES)
    for page in PAGES:
        blocks = re.findall(r"```text\n(.*?)```|`([^`\n]+)`", page.read_text(), re.DOTALL)
        yield page.name, "\n".join(a or b for a, b in blocks if "subnetact_" in a + b)


@pytest.fixture(scope="module")
def exported(server):
    """Names of the samples of a server's metrics, each with its labels."""
    parser = pytest.importorskip("prometheus_client.parser")
    server.call("POST", "/infer", {"input": [1.0] * 256})
    server.call("GET", "/readyz")
    samples, suffixes = {}, {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    for family in parser.text_string_to_metric_families(server.call("GET", "/metrics")[2]):
        for suffix in suffixes.get(family.type, [""]):  # there may be no sample yet
            samples[family.name + suffix] = {"subnet"} if family.name in UNSEEN else set()
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


def test_every_query_names_metrics_and_labels_that_a_server_exports(exported):
    recorded = set(re.findall(r"record: (\S+)", RULES))
    for where, text in written():
        for name, _, labels in re.findall(r"\b(subnetact_\w*[a-z])\b(\{([^}]*)\})?", text):
            prose = where.endswith(".md") and f"{name}_count" in exported
            assert name in exported or prose, f"{where}: {name}"
            used = set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", labels))
            assert used <= exported.get(name, set()) | OF_PROMETHEUS, f"{where}: {name}{{{labels}}}"
        assert set(re.findall(r"subnetact:[\w:]+", text)) <= recorded, where


def test_every_alert_is_explained_and_tried():
    page, tried = (ROOT / "docs/howto/monitor.md").read_text(), (EXAMPLES / "rules_test.yaml").read_text()
    for name in re.findall(r"alert: (\w+)", RULES):
        assert f"`{name}`" in page, name
        assert name in tried, name


@needs_prometheus
def test_promtool_accepts_the_rules_their_tests_and_the_queries_of_the_dashboard(tmp_path):
    lines = [f"      - {{record: 'a:b', expr: {json.dumps(filled(query))}}}" for query in QUERIES]
    lines = [line.replace("a:b", f"a:b{i}") for i, line in enumerate(lines)]
    (tmp_path / "queries.yaml").write_text("groups:\n  - name: dashboard\n    rules:\n" + "\n".join(lines))
    own = f"{tmp_path}/queries.yaml"
    for command in (("check", "rules.yaml"), ("check", own), ("test", "rules_test.yaml")):
        words = ["promtool", command[0], "rules", command[1]]
        done = subprocess.run(words, cwd=EXAMPLES, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
