"""Open-loop load tests: `python -m subnetact.loadtest URL` sends a trace and reports what became of it.

* `arrivals`: the traces; `open_loop`: sends requests at their times, and sums up.
* `http_client`, `server_client`: how requests travel.
"""
