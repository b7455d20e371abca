"""The example for Kubernetes: what can be checked of it without a cluster."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

from subnetact.serve.source import Source  # noqa: E402

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "cluster"
TEXTS = {str}
"""An object of texts."""
POD = {"metadata?": dict, "spec": dict}
HEAD = {
    "serviceType?": str,
    "headService?": dict,
    "enableIngress?": bool,
    "rayStartParams": TEXTS,
    "template": POD,
}
COUNTS = {"replicas?": int, "minReplicas": int, "maxReplicas": int, "numOfHosts?": int}
WORKERS = {"groupName": str, **COUNTS, "rayStartParams": TEXTS, "template": POD, "scaleStrategy?": dict}
CLUSTER = {
    **{"headGroupSpec": HEAD, "workerGroupSpecs?": [WORKERS], "rayVersion?": str, "suspend?": bool},
    **{"enableInTreeAutoscaling?": bool, "autoscalerOptions?": dict, "headServiceAnnotations?": TEXTS},
}
SPEC = {"serveConfigV2?": str, "rayClusterConfig?": CLUSTER, "serveService?": dict}
RAY_SERVICE = {"apiVersion": str, "kind": str, "metadata": dict, "spec": SPEC}
"""Type of every field of ray.io/v1 RayService, as KubeRay (Apache License 2.0) publishes them in
ray-operator/apis/ray/v1; those with ? may be missing, and those that it calls deprecated are left out."""


def faults(value, kind, where=""):
    """Return what of a document does not fit a table of fields."""
    if isinstance(kind, list) and isinstance(value, list):
        return [text for i, item in enumerate(value) for text in faults(item, kind[0], f"{where}[{i}]")]
    if isinstance(kind, dict) and isinstance(value, dict):
        fields = {name.rstrip("?"): one for name, one in kind.items()}
        found = [f"{where}.{name}: unknown" for name in value.keys() - fields.keys()]
        found += [f"{where}.{name}: missing" for name in kind if name[-1] != "?" and name not in value]
        known = value.keys() & fields.keys()
        return found + [text for n in known for text in faults(value[n], fields[n], f"{where}.{n}")]
    if kind == TEXTS:
        fits = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    else:
        fits = type(value) is kind
    return [] if fits else [f"{where}: {value!r} does not fit"]


@pytest.fixture(scope="module")
def manifest():
    return yaml.safe_load((EXAMPLE / "service.yaml").read_text())


@pytest.fixture(scope="module")
def config(manifest):
    return yaml.safe_load(manifest["spec"]["serveConfigV2"])


def templates(manifest):
    cluster = manifest["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"]["template"], *(g["template"] for g in cluster["workerGroupSpecs"])]


def test_the_manifest_has_the_fields_of_a_ray_service(manifest):
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])
    assert faults(manifest, RAY_SERVICE) == []
    for group in manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_versions_agree(manifest):
    pinned = re.search(r"^ray==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert manifest["spec"]["rayClusterConfig"]["rayVersion"] == pinned
    assert f"ray[serve]>={'.'.join(pinned.split('.')[:2])}" in (ROOT / "setup.cfg").read_text()


def test_the_pods_fit_the_published_schema(manifest):
    validate = pytest.importorskip("kubernetes_validate")
    for template in templates(manifest):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
        validate.validate(pod, "1.30", strict=True)


def test_the_arguments_are_those_of_build_app(config):
    """Every argument is known, as a parameter of `build_app` or as an attribute of `Source`."""
    [application] = config["applications"]
    source = (ROOT / "subnetact" / "cluster" / "application.py").read_text()
    signature = source.split("def build_app(")[1].split(") -> Any:")[0]
    parameters = set(re.findall(r"^    (\w+):", signature, re.MULTILINE))
    assert {"bundle", "replicas", "autoscaling"} <= parameters
    assert set(application["args"]) <= parameters | set(inspect.signature(Source).parameters)
    module, _, name = application["import_path"].partition(":")
    assert module == "subnetact.cluster"
    assert f"def {name}(args: dict[str, Any])" in source


@pytest.mark.ray
def test_the_configuration_fits_rays_schema(config):
    schema = pytest.importorskip("ray.serve.schema", reason="needs Ray Serve: the extra `ray`")
    schema.ServeDeploySchema.model_validate(config)
    with pytest.raises(ValueError, match="import_path"):
        schema.ServeDeploySchema.model_validate(
            {**config, "applications": [{**config["applications"][0], "import_path": "nothing"}]}
        )


def instructions(text):
    """Instructions of a Dockerfile with their arguments, continuation lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [tuple(line.split(None, 1)) for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()]


def test_the_image_and_the_readme_name_files_that_exist():
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "USER", "ENV", "CMD"}
    found = instructions((EXAMPLE / "Dockerfile").read_text())
    assert found[0][0] == "FROM"
    assert {name for name, _ in found} <= known
    for name, rest in found:
        words = shlex.split(rest)
        if name == "COPY":
            assert len(words) >= 2
            assert all((ROOT / word).exists() for word in words[:-1] if not word.startswith("$"))
        elif name == "ENV":
            assert all(re.fullmatch(r"\w+=\S*", word) for word in words)
        elif name == "CMD":
            command = json.loads(rest)
            assert command[:3] == ["serve", "run", "subnetact.cluster:app_from"]
            assert {word.partition("=")[0] for word in command[3:]} == {"bundle", "replicas"}
    for path in re.findall(r"examples/cluster/[\w.]+", (EXAMPLE / "README.md").read_text()):
        assert (ROOT / path).exists(), path
