"""Demonstrations on the embedded models: `python -m subnetact.demo` and `python -m subnetact.demo --text`.

* `digits_demo`: handwritten digits under deadlines, from calibration to live serving.
* `text_demo`: prompts under deadlines per token, with a subnet per step of generation.
* `machine_notes`: when a result says more about the machine than about the policies.
"""
