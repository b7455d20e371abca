"""The example for Kubernetes: what can be checked of it without a cluster."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

from subnetact.serve.source import Source  # noqa: E402

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "cluster"
MANIFEST = yaml.safe_load((EXAMPLE / "service.yaml").read_text())
CONFIG = yaml.safe_load(MANIFEST["spec"]["serveConfigV2"])
CLUSTER = MANIFEST["spec"]["rayClusterConfig"]


def test_versions_and_counts_agree():
    assert (MANIFEST["apiVersion"], MANIFEST["kind"]) == ("ray.io/v1", "RayService")
    pinned = re.search(r"^ray==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert CLUSTER["rayVersion"] == pinned
    assert f"ray[serve]>={'.'.join(pinned.split('.')[:2])}" in (ROOT / "setup.cfg").read_text()
    for group in CLUSTER["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_pods_fit_the_published_schema():
    validate = pytest.importorskip("kubernetes_validate")
    for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        validate.validate(pod, "1.30", strict=True)


def test_the_arguments_are_those_of_build_app():
    """Every argument is known, as a parameter of `build_app` or as an attribute of `Source`."""
    [application] = CONFIG["applications"]
    source = (ROOT / "subnetact" / "cluster" / "application.py").read_text()
    signature = source.split("def build_app(")[1].split(") -> Any:")[0]
    parameters = set(re.findall(r"^    (\w+):", signature, re.MULTILINE))
    assert {"bundle", "replicas", "autoscaling"} <= parameters
    assert set(application["args"]) <= parameters | set(inspect.signature(Source).parameters)
    module, _, name = application["import_path"].partition(":")
    assert module == "subnetact.cluster"
    assert f"def {name}(args: dict[str, Any])" in source


@pytest.mark.ray
def test_the_configuration_fits_rays_schema():
    schema = pytest.importorskip("ray.serve.schema", reason="needs Ray Serve: the extra `ray`")
    schema.ServeDeploySchema.model_validate(CONFIG)


def test_the_image_and_the_readme_name_files_that_exist():
    text = re.sub(r"\\\n\s*", "", (EXAMPLE / "Dockerfile").read_text())
    for words in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        assert all((ROOT / word).exists() for word in words.split()[:-1] if not word.startswith("$"))
    command = json.loads(re.search(r"^CMD (.*)$", text, re.MULTILINE)[1])
    assert command[:3] == ["serve", "run", "subnetact.cluster:app_from"]
    assert {word.partition("=")[0] for word in command[3:]} == {"bundle", "replicas"}
    for path in re.findall(r"examples/cluster/[\w.]+", (EXAMPLE / "README.md").read_text()):
        assert (ROOT / path).exists(), path
