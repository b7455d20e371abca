"""Run by the environment that has tritonclient: concurrent requests from a file, answers into another.

triton_client.py PROTOCOL URL REQUESTS.npz ANSWERS.npz; `job` in the archive is a JSON list of
{"model", "inputs": {name: [key of an array, Triton type]}, "outputs": [names], "parameters": {}}, and may
have a `timeout`, a `priority` and a `client_timeout`.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import numpy as np


def main(protocol, url, requests, answers):
    client_module = import_module(f"tritonclient.{protocol}")
    arrays = np.load(requests)
    job = json.loads(str(arrays["job"]))

    def ask(request):
        client = client_module.InferenceServerClient(url)  # the http client belongs to one thread
        inputs = []
        for name, (key, kind) in request["inputs"].items():
            x = client_module.InferInput(name, arrays[key].shape, kind)
            x.set_data_from_numpy(arrays[key])
            inputs.append(x)
        try:
            options = {k: request[k] for k in ("timeout", "priority", "client_timeout") if k in request}
            result = client.infer(
                request["model"], inputs, parameters=request["parameters"] or None, **options
            )
        except Exception as error:
            return {"error": np.array(str(error))}
        return {name: result.as_numpy(name) for name in request["outputs"]}

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(ask, job))
    np.savez(
        answers, **{f"{i}.{name}": array for i, answer in enumerate(found) for name, array in answer.items()}
    )


main(*sys.argv[1:])
