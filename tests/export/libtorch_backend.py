"""A stand-in for Triton's libtorch backend, which nvidia-pytriton does not bundle.

Served as `backends/pytorch/model.py`, a Python-based backend of the same name, so that the exported
config.pbtxt is used as it is. It does with a batch what the libtorch backend does: concatenate the
requests' inputs by position, call the TorchScript file once, split the output.
"""

import json
import os

import torch
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.names = sorted(i["name"] for i in config["input"])
        self.batched = config["max_batch_size"] > 0
        path = os.path.join(args["model_repository"], args["model_version"], "model.pt")
        self.module = torch.jit.load(path)
        self.sizes = []

    def execute(self, requests):
        inputs = [
            [torch.from_numpy(pb.get_input_tensor_by_name(r, n).as_numpy().copy()) for r in requests]
            for n in self.names
        ]
        print("LIBTORCH-BATCH", [list(x.shape) for x in inputs[1]], flush=True)
        try:
            with torch.inference_mode():
                if self.batched:
                    outputs = self.module(*(torch.cat(x) for x in inputs)).split([len(x) for x in inputs[0]])
                else:
                    outputs = [self.module(*(x[i] for x in inputs)) for i in range(len(requests))]
        except Exception as error:
            failed = pb.TritonError(str(error))
            return [pb.InferenceResponse(error=failed) for _ in requests]
        return [pb.InferenceResponse([pb.Tensor("OUTPUT__0", y.numpy().copy())]) for y in outputs]
