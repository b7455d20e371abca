"""The Open Inference Protocol, by hand and with Triton's client."""

from __future__ import annotations

import json
import os
import subprocess
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
    version = model["versions"][0]
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        f"{MODEL}/ready",
        f"{MODEL}/versions/{version}/ready",
    ):
        assert server.call("GET", path)[0] == 200
    status, _, text = server.call("GET", "/v2/models/other")
    assert (status, list(json.loads(text))) == (404, ["error"])


@pytest.mark.parametrize("nested", [False, True])
def test_json_tensors_with_parameters(server, digits, images, nested):
    x = images[:3]
    data = x.tolist() if nested else x.flatten().tolist()
    request = {
        "id": "42",
        "parameters": {"deadline_ms": 60_000, "min_accuracy": 82},
        "inputs": [tensor(x, data=data)],
    }
    status, answer = infer(server, request)
    assert (status, answer["id"], answer["model_name"]) == (200, "42", "digits")
    assert answer["parameters"]["subnet"] == "2,2,2"
    assert answer["parameters"]["accuracy"] == 82.0
    [output] = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("output", "FP32", [3, 10])
    found = torch.tensor(output["data"]).reshape(3, 10)
    assert torch.allclose(found, digits[0](x, subnet=2), atol=1e-3)


def test_the_deadline_may_be_a_header(server, images):
    request = {"inputs": [tensor(images[:1], data=images[:1].flatten().tolist())]}
    assert infer(server, request, headers={"x-deadline-ms": "60000", "x-min-accuracy": "82"})[0] == 200
    assert infer(server, request, headers={"x-deadline-ms": "0.001"})[0] == 504


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


def changed(**fields):
    """A request whose tensor has other fields; what is None is left out."""
    return {"inputs": [{name: value for name, value in {**GOOD, **fields}.items() if value is not None}]}


def asking(**fields):
    return {"inputs": [GOOD], **fields}


BAD = {
    "no inputs": {},
    "inputs of another kind": {"inputs": 5},
    "no tensor": {"inputs": []},
    "a tensor too many": {"inputs": [GOOD, GOOD]},
    "a tensor that is none": {"inputs": [5]},
    "another name": changed(name="x"),
    "a name that cannot be": changed(name={"a": 1}),
    "without a batch dimension": changed(shape=[1, 16, 16]),
    "no row": changed(shape=[0, 1, 16, 16], data=[]),
    "a million rows": changed(shape=[10**6, 1, 16, 16]),
    "a shape of words": changed(shape=["1", 1, 16, 16]),
    "another datatype": changed(datatype="BYTES"),
    "a datatype that cannot be": changed(datatype={"a": 1}),
    "too little data": changed(data=[0.0] * 255),
    "no data": changed(data=None),
    "binary data that is not there": changed(parameters={"binary_data_size": 1024}),
    "negative binary data": changed(parameters={"binary_data_size": -4}),
    "fractions that are said to be INT8": changed(datatype="INT8", data=[0.5] * 256),
    "fractions without a rest that are said to be INT64": changed(datatype="INT64", data=[1.0] * 256),
    "numbers that INT8 does not hold": changed(datatype="INT8", data=[128] * 256),
    "negative numbers that are said to be UINT8": changed(datatype="UINT8", data=[-1] * 256),
    "numbers that are said to be BOOL": changed(datatype="BOOL", data=[0.5] * 256),
    "truth values that are said to be FP32": changed(data=[True] * 256),
    "numbers that FP32 does not hold": changed(data=[1e39] * 256),
    "parameters of another kind": asking(parameters=5),
    "an endless deadline": asking(parameters={"deadline_ms": 1e308}),
    "an output that is not there": asking(outputs=[{"name": "logits"}]),
    "outputs of another kind": asking(outputs=5),
    "outputs that are no list": asking(outputs={}),
    "outputs that are false": asking(outputs=False),
    "a wish for raw bytes that is no truth value": asking(parameters={"binary_data_output": 1}),
    "the same of one output": asking(outputs=[{"name": "output", "parameters": {"binary_data": "yes"}}]),
    "classification": asking(outputs=[{"name": "output", "parameters": {"classification": 3}}]),
    "an id that is no text": asking(id=5),
    "another field": asking(pixels=[]),
}


@pytest.mark.parametrize("request_", BAD.values(), ids=BAD)
def test_bad_requests_are_told_so(server, request_):
    status, answer = infer(server, request_)
    assert (status, list(answer)) == (400, ["error"])


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("INT8", [0, -128, 127, 1]),
        ("UINT8", [0, 255, 7, 1]),
        ("UINT32", [2**32 - 1, 0, 7, 1]),
        ("INT64", [0, -(2**62), 7, 1]),
        ("BOOL", [True, False, True, True]),
        ("FP16", [0.5, 1, -2.25, 0]),
        ("BF16", [0.5, 1, -2.25, 0]),
        ("FP64", [0.1, 1, -2.25, 0]),
    ],
)
async def test_json_of_every_datatype_is_what_it_says(gated, post, datatype, values):
    """As with raw bytes, numbers of other datatypes are converted to what is served."""
    entry = {"name": "input", "shape": [1, 4], "datatype": datatype, "data": values}

    with gated() as (app, runner, _):
        runner.gate.set()
        raw = json.dumps({"inputs": [entry]}).encode()
        status, _, body = await post(app, None, path="/v2/models/model/infer", raw=raw)
        assert status == 200, body
        found = torch.tensor(json.loads(body)["outputs"][0]["data"])
        assert torch.equal(found, torch.tensor([float(v) for v in values]))


async def test_more_rows_than_can_ever_wait_are_told_so(gated, post):
    """They would fill the queue by themselves, so a client that retries later would never succeed."""
    entry = {"name": "input", "shape": [5, 4], "datatype": "FP32", "data": [0.5] * 20}

    with gated(max_queue=4) as (app, runner, _):
        runner.gate.set()
        for rows, expected in ((5, 400), (4, 200)):
            asked = {**entry, "shape": [rows, 4], "data": [0.5] * 4 * rows}
            raw = json.dumps({"inputs": [asked]}).encode()
            status, _, body = await post(app, None, path="/v2/models/model/infer", raw=raw)
            assert status == expected, body
            assert status == 200 or b"N from 1 to 4" in body


def test_data_beside_raw_bytes_are_refused(server):
    entry = {**GOOD, "parameters": {"binary_data_size": 1024}}
    status, answer = infer(server, {"inputs": [entry]}, bytes(1024))
    assert (status, "either data or binary_data_size" in answer["error"]) == (400, True)
    del entry["data"]
    assert infer(server, {"inputs": [entry], "parameters": {"deadline_ms": 60_000}}, bytes(1024))[0] == 200


def test_bad_binary_requests_are_told_so(server):
    entry = {**{k: v for k, v in GOOD.items() if k != "data"}, "parameters": {"binary_data_size": 1024}}
    text = json.dumps({"inputs": [entry]}).encode()
    for length, raw in (
        (len(text), b"x" * 1023),
        (len(text), b"x" * 1025),
        (10**9, b""),
        (-1, b""),
        (3, b""),
    ):
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


def test_the_name_of_the_model_may_be_repeated_in_the_body(server, images):
    """KServe's client does so; another name is a mistake."""
    request = {"inputs": [tensor(images[:1], data=images[:1].tolist())], "model_name": "digits"}
    assert infer(server, request)[0] == 200
    for wrong in ("letters", 7):
        assert infer(server, {**request, "model_name": wrong})[0] == 400


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
