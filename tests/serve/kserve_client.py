"""Asks a server with KServe's own client; run by a Python that has kserve: URL, file of the input, output."""

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig


async def main(url: str, given: str, written: str) -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))
    assert await client.is_server_live(url)
    assert await client.is_server_ready(url)
    assert await client.is_model_ready(url, "digits")
    x = np.load(given)
    outputs = []
    for binary in (False, True):
        tensor = InferInput("input", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x, binary_data=binary)
        parameters = {"deadline_ms": 60_000, "min_accuracy": 82}
        request = InferRequest("digits", [tensor], parameters=parameters)
        response = await client.infer(url, request, model_name="digits")
        outputs.append(response.outputs[0].as_numpy())
    np.save(written, np.stack(outputs))
    print(json.dumps({"model": response.model_name}))


asyncio.run(main(*sys.argv[1:]))
