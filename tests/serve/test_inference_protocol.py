"""The Open Inference Protocol, by hand and with Triton's client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

MODEL = "/v2/models/digits"


def tensor(images, **more):
    return {"name": "input", "shape": list(images.shape), "datatype": "FP32", **more}


def infer(server, request, raw=b"", headers=None):
    text = json.dumps(request).encode()
    sent = {**({"Inference-Header-Content-Length": str(len(text))} if raw else {}), **(headers or {})}
    status, _, answer = server.call("POST", f"{MODEL}/infer", text + raw, sent)
    return status, json.loads(answer)


def test_metadata(server):
    model = json.loads(server.call("GET", MODEL)[2])
    assert model["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 1, 16, 16]}]
    assert model["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 10]}]
    assert json.loads(server.call("GET", "/v2")[2])["extensions"] == ["binary_tensor_data"]
    assert json.loads(server.call("GET", "/v2/models")[2]) == {"models": ["digits"]}
    own = (f"{MODEL}/ready", f"{MODEL}/versions/{model['versions'][0]}/ready")
    for path in ("/v2/health/live", "/v2/health/ready", *own):
        assert server.call("GET", path)[0] == 200
    status, _, text = server.call("GET", "/v2/models/other")
    assert (status, list(json.loads(text))) == (404, ["error"])


@pytest.mark.parametrize("nested", [False, True])
def test_json_tensors_with_parameters(server, digits, images, nested):
    x = images[:3]
    inputs = {"inputs": [tensor(x, data=x.tolist() if nested else x.flatten().tolist())]}
    parameters = {"deadline_ms": 60_000, "min_accuracy": 82}
    status, answer = infer(server, {"id": "42", "parameters": parameters, **inputs})
    assert (status, answer["id"], answer["model_name"]) == (200, "42", "digits")
    assert (answer["parameters"]["subnet"], answer["parameters"]["accuracy"]) == ("2,2,2", 82.0)
    [output] = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("output", "FP32", [3, 10])
    found = torch.tensor(output["data"]).reshape(3, 10)
    assert torch.allclose(found, digits[0](x, subnet=2), atol=1e-3)
    for deadline, status in (("60000", 200), ("0.001", 504)):  # as headers
        headers = {"x-deadline-ms": deadline, "x-min-accuracy": "82"}
        assert infer(server, inputs, headers=headers)[0] == status
    for name, status in (("digits", 200), ("letters", 400), (7, 400)):  # KServe's client repeats the name
        assert infer(server, {**inputs, "model_name": name})[0] == status


def test_binary_tensors_of_other_types(server, digits, images):
    x = images[:2]
    for datatype, dtype in (("FP32", "<f4"), ("FP64", "<f8"), ("FP16", "<f2")):
        raw = x.numpy().astype(dtype).tobytes()
        entry = tensor(x, parameters={"binary_data_size": len(raw)})
        entry["datatype"] = datatype
        request = {"inputs": [entry], "parameters": {"deadline_ms": 60_000, "min_accuracy": 82}}
        status, answer = infer(server, request, raw)
        assert status == 200, answer
        found = torch.tensor(answer["outputs"][0]["data"]).reshape(2, 10)
        assert torch.allclose(found, digits[0](x, subnet=2), atol=0.05)


GOOD = {"name": "input", "shape": [1, 1, 16, 16], "datatype": "FP32", "data": [0.0] * 256}


WITHOUT = {name: value for name, value in GOOD.items() if name != "data"}
TENSORS = [
    WITHOUT,
    *({**GOOD, "name": name} for name in ("x", {"a": 1})),
    {**GOOD, "shape": [0, 1, 16, 16], "data": []},
    *({**GOOD, "shape": shape} for shape in ([1, 16, 16], [10**6, 1, 16, 16], ["1", 1, 16, 16])),
    *({**GOOD, "datatype": datatype} for datatype in ("BYTES", {"a": 1})),
    *({**GOOD, "data": data} for data in ([0.0] * 255, [True] * 256, [1e39] * 256)),
    *({**GOOD, "parameters": {"binary_data_size": size}} for size in (1024, -4)),
    *({**GOOD, "datatype": "INT8", "data": [value] * 256} for value in (0.5, 128)),
    {**GOOD, "datatype": "INT64", "data": [1.0] * 256},
    {**GOOD, "datatype": "UINT8", "data": [-1] * 256},
    {**GOOD, "datatype": "BOOL", "data": [0.5] * 256},
]
OF_AN_OUTPUT = [{"binary_data": "yes"}, {"classification": 3}]
BAD = [
    *({"inputs": inputs} for inputs in (5, [], [GOOD, GOOD], [5])),
    *({"inputs": [one]} for one in TENSORS),
    *({"inputs": [GOOD], "parameters": p} for p in (5, {"deadline_ms": 1e308}, {"binary_data_output": 1})),
    *({"inputs": [GOOD], "outputs": outputs} for outputs in (5, {}, False, [{"name": "logits"}])),
    *({"inputs": [GOOD], "outputs": [{"name": "output", "parameters": p}]} for p in OF_AN_OUTPUT),
    *({"inputs": [GOOD], **field} for field in ({"id": 5}, {"pixels": []})),
    {},
]


def test_bad_requests_are_told_so(server):
    for request in BAD:
        status, answer = infer(server, request)
        assert (status, list(answer)) == (400, ["error"]), str(request)[:200]


VALUES = {
    **{"INT8": [0, -128, 127, 1], "UINT8": [0, 255, 7, 1], "UINT32": [2**32 - 1, 0, 7, 1]},
    **{"INT64": [0, -(2**62), 7, 1], "BOOL": [True, False, True, True], "FP64": [0.1, 1, -2.25, 0]},
    **{key: [0.5, 1, -2.25, 0] for key in ("FP16", "BF16")},
}


async def test_json_of_every_datatype_is_what_it_says(gated, post):
    """As with raw bytes, numbers of other datatypes are converted to what is served."""
    with gated() as (app, runner, _):
        runner.gate.set()
        for datatype, values in VALUES.items():
            entry = {"name": "input", "shape": [1, 4], "datatype": datatype, "data": values}
            raw = json.dumps({"inputs": [entry]}).encode()
            status, _, body = await post(app, None, path="/v2/models/model/infer", raw=raw)
            assert status == 200, body
            found = torch.tensor(json.loads(body)["outputs"][0]["data"])
            assert torch.equal(found, torch.tensor([float(v) for v in values]))


async def test_more_rows_than_can_ever_wait_are_told_so(gated, post):
    """They would fill the queue by themselves, so a client that retries later would never succeed."""
    with gated(max_queue=4) as (app, runner, _):
        runner.gate.set()
        for rows, expected in ((5, 400), (4, 200)):
            entry = {"name": "input", "shape": [rows, 4], "datatype": "FP32", "data": [0.5] * 4 * rows}
            raw = json.dumps({"inputs": [entry]}).encode()
            status, _, body = await post(app, None, path="/v2/models/model/infer", raw=raw)
            assert status == expected, body
            assert status == 200 or b"N from 1 to 4" in body


def test_bad_binary_requests_are_told_so(server):
    size = {"parameters": {"binary_data_size": 1024}}
    status, answer = infer(server, {"inputs": [{**GOOD, **size}]}, bytes(1024))
    assert (status, "either data or binary_data_size" in answer["error"]) == (400, True)
    entry = {**WITHOUT, **size}
    assert infer(server, {"inputs": [entry], "parameters": {"deadline_ms": 60_000}}, bytes(1024))[0] == 200
    text = json.dumps({"inputs": [entry]}).encode()
    wrong = [(len(text), b"x" * 1023), (len(text), b"x" * 1025), (10**9, b""), (-1, b""), (3, b"")]
    for length, raw in wrong:
        headers = {"Inference-Header-Content-Length": str(length)}
        status, _, answer = server.call("POST", f"{MODEL}/infer", text + raw, headers)
        assert (status, list(json.loads(answer))) == (400, ["error"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("binary", [True, False])
def test_tritons_client_gets_right_answers(server, digits, images, binary):
    client_module = pytest.importorskip("tritonclient.http")
    client = client_module.InferenceServerClient("{}:{}".format(*server.address))
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("digits")
        assert client.get_server_metadata()["name"] == "subnetact"
        assert client.get_model_metadata("digits")["inputs"][0]["shape"] == [-1, 1, 16, 16]
        x = images[:4].numpy()
        given = client_module.InferInput("input", list(x.shape), "FP32")
        given.set_data_from_numpy(x, binary_data=binary)
        wanted = client_module.InferRequestedOutput("output", binary_data=binary)
        parameters = {"deadline_ms": 60_000, "min_accuracy": 82}
        result = client.infer("digits", [given], outputs=[wanted], parameters=parameters, request_id="7")
        output = result.as_numpy("output")
        assert np.allclose(output, digits[0](images[:4], subnet=2).numpy(), atol=1e-3)
        assert result.get_response()["id"] == "7"
        assert np.argmax(
            client.infer("digits", [given], headers={"x-deadline-ms": "60000"}).as_numpy("output"), 1
        ).shape == (4,)
        with pytest.raises(Exception, match="min_accuracy"):
            client.infer("digits", [given], parameters={"min_accuracy": 99})
    finally:
        client.close()


KSERVE = os.environ.get("SUBNETACT_KSERVE_ENV", "")
"""An environment with kserve, whose dependencies contradict ours."""


@pytest.mark.skipif(not KSERVE, reason="needs an environment with kserve: SUBNETACT_KSERVE_ENV=DIR")
def test_kserves_client_gets_right_answers(server, digits, images, tmp_path):
    given, written = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(given, images[:4].numpy())
    client = [Path(KSERVE) / "bin" / "python", Path(__file__).parent / "kserve_client.py"]
    subprocess.run([*client, f"{server.url}", given, written], check=True, timeout=120)
    expected = digits[0](images[:4], subnet=2).numpy()
    for output in np.load(written):
        assert np.allclose(output.reshape(4, 10), expected, atol=1e-3)


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
