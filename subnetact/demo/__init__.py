"""A demonstration on an embedded model: `python -m subnetact.demo`.

* `digits_demo`: handwritten digits under deadlines, from calibration to live serving.
* `contenders`: several ways to serve one trace, their table and their figure.
"""
