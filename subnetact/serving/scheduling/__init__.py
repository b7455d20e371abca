"""Which request runs when, on which worker and which subnet: no lock, no thread, no clock.

* `scheduler`: every transition of a request and of a worker; `request`: asks, requests and jobs.
* `dispatch`: how a policy's answer becomes a batch; `context`: what a policy sees.
* `queue`, `floors`, `priority`, `fair_shares`: who goes first.
* `worker_states`: which workers there are.
"""
