"""Model repositories for NVIDIA Triton Inference Server.

* `exporter`: `to_triton` writes a model.
* `python_backend`: the `model.py` of the Python flavour, which runs inside Triton.
"""
