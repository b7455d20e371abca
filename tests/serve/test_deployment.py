"""The image and the manifests of examples/kubernetes: what can be checked of them without a cluster."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from subnetact.serve.cli import options
from subnetact.serve.server import GRACEFUL_S

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kubernetes"
README = (EXAMPLE / "README.md").read_text()
BY_KIND = {one["kind"]: one for one in yaml.safe_load_all((EXAMPLE / "server.yaml").read_text())}
POD = BY_KIND["Deployment"]["spec"]["template"]
SERVER = POD["spec"]["containers"][0]
MONITOR = BY_KIND["PodMonitor"]


def instructions():
    """Words of the image's instructions by name; continuation lines are joined."""
    text = re.sub(r"\\\n\s*", "", (EXAMPLE / "Dockerfile").read_text())
    for line in text.splitlines():
        if line and not line.startswith("#"):
            yield line.split(None, 1)


def arguments():
    """The options that the pods' server gets, behind those of the image."""
    entry = json.loads(dict(instructions())["ENTRYPOINT"])
    assert entry[:5] == ["tini", "--", "python", "-m", "subnetact.serve"]
    return options().parse_args([*entry[5:], *SERVER["args"]])


@pytest.mark.parametrize("kind", sorted(BY_KIND.keys() - {"PodMonitor"}))
def test_a_manifest_fits_the_published_schema(kind):
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(BY_KIND[kind], "1.30", strict=True)


def test_the_manifests_fit_each_other():
    labels = POD["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in SERVER["ports"]}
    selectors = [BY_KIND[kind]["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodMonitor")]
    selectors += [BY_KIND["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]]
    assert all(selector == labels for selector in [*selectors, BY_KIND["Service"]["spec"]["selector"]])
    used = [SERVER[f"{name}Probe"]["httpGet"]["port"] for name in ("startup", "liveness", "readiness")]
    used += [one["targetPort"] for one in BY_KIND["Service"]["spec"]["ports"]]
    used += [one["port"] for one in MONITOR["spec"]["podMetricsEndpoints"]]
    assert set(used) <= set(ports)
    assert ports["http"] == arguments().port
    target = BY_KIND["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", BY_KIND["Deployment"]["metadata"]["name"])


def test_the_server_gets_time_to_drain_and_only_its_death_restarts_it():
    assert POD["spec"]["terminationGracePeriodSeconds"] > arguments().grace_s + GRACEFUL_S
    paths = {name: SERVER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/readyz", "liveness": "/livez", "readiness": "/readyz"}
    assert arguments().grace_s >= 2 * SERVER["readinessProbe"]["periodSeconds"]


def test_the_token_of_the_scrapes_is_in_the_secret():
    secret = next(volume["secret"] for volume in POD["spec"]["volumes"] if "secret" in volume)
    mounted = next(one["mountPath"] for one in SERVER["volumeMounts"] if one["name"] == "tokens")
    assert str(arguments().token_file) == f"{mounted}/{secret['items'][0]['path']}"
    [scraped] = MONITOR["spec"]["podMetricsEndpoints"]
    named = scraped["authorization"]["credentials"]
    assert named["name"] == secret["secretName"]
    made = re.search(r"create secret generic (\S+) --from-file=(\S+) --from-literal=(\w+)=", README)
    assert made is not None
    assert made.groups() == (secret["secretName"], secret["items"][0]["key"], named["key"])
    fields = {"port", "path", "interval", "authorization"}  # of monitoring.coreos.com/v1
    assert set(scraped) == fields
    assert set(MONITOR["spec"]) == {"selector", "podMetricsEndpoints"}


def test_the_autoscaler_reads_a_metric_that_the_rules_record():
    [metric] = BY_KIND["HorizontalPodAutoscaler"]["spec"]["metrics"]
    [rule] = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)[0])["rules"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    recorded = rule["seriesQuery"].partition("{")[0]
    assert f"record: {recorded}\n" in (ROOT / "examples/monitoring/rules.yaml").read_text()


def test_the_image_is_made_of_files_that_exist():
    for name, rest in instructions():
        words = shlex.split(rest)
        if name == "COPY":
            assert all((ROOT / word).exists() for word in words[:-1] if not word.startswith("$"))
        elif name == "CMD":
            entry = json.loads(dict(instructions())["ENTRYPOINT"])
            assert options().parse_args([*entry[5:], *json.loads(rest)]).host == "0.0.0.0"
    paths = re.findall(r"examples/[\w./]+\w|(?<=\]\()\.\.[\w./]+", README)
    assert paths
    for path in paths:
        assert (ROOT / path if path.startswith("examples") else EXAMPLE / path).exists(), path


def test_the_exit_statuses_of_the_page_are_those_of_the_server(server, digits):
    """The rest of them are tried in test_server, test_http_answers and test_command."""
    page = (ROOT / "docs" / "howto" / "production.md").read_text()
    command = ["-m", "subnetact.serve", "--port", str(server.address[1]), "--bundle", str(digits[1])]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert re.search("in use.*another --port", done.stderr), done.stderr
    assert all(f"\n| {status} | " in page for status in (0, "143, 130", 2, 3))
