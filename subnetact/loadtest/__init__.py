"""Open-loop load tests: `python -m subnetact.loadtest URL` sends a trace and reports what became of it.

`open_loop` sends requests at the times of a trace and sums up; `http_client` is how they travel.
"""
