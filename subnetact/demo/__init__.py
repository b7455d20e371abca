"""Demonstrations on the embedded models: `python -m subnetact.demo` and `python -m subnetact.demo --text`.

* `digits_demo`: handwritten digits under deadlines, from calibration to live serving.
* `text_demo`: prompts under deadlines per token, with a subnet per step of generation.
* `contenders`: what both share.
"""
