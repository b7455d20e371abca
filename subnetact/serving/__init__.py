"""Deadline-aware scheduling: a live batcher, policies, a simulator, bounds and pipelines.

Nothing here imports torch. What most users need is imported from this package; other names, such as
`WorkerEvent`, from the files that the folders below name.

Which folder answers which question (each imports only from those above it):

* `scheduling/`: `Scheduler`, every transition of requests and workers without a lock, a thread or a clock;
  which request leaves the queue first, what a policy sees, and how its answer becomes a batch.
* `policies/`: which subnet and batch size an idle worker runs next; one file per policy.
* `live/`: `Batcher`, which serves requests from threads and asyncio, with its statistics and its log.
* `simulation/`: `simulate`, traces and data sets of arrivals, upper bounds, replays of live runs.
* `pipelines/`: `Pipeline`, stages behind each other under end-to-end deadlines, and their planning.
* `tenants/`: `TenantBatcher`, several supernets that share workers.
"""

from subnetact.serving.live.answers import Answer
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.live.prometheus import Collector
from subnetact.serving.live.runner import Runner
from subnetact.serving.live.stats import BatcherStats
from subnetact.serving.pipelines.model import PipelineModel, StageModel
from subnetact.serving.pipelines.pipeline import Pipeline, PipelineAnswer
from subnetact.serving.pipelines.planner import PipelinePlan, plan_pipeline
from subnetact.serving.pipelines.stage import Stage
from subnetact.serving.policies.baselines import CheapestFeasible, Fixed, MaxAcc, MaxBatch
from subnetact.serving.policies.hullfit import HullFit
from subnetact.serving.policies.model_switching import ModelSwitching
from subnetact.serving.policies.preemptive import Preemptive
from subnetact.serving.policies.registry import make_policy
from subnetact.serving.policies.slackfit import SlackFit
from subnetact.serving.scheduling.context import Context, Policy
from subnetact.serving.scheduling.fair_shares import FairShares
from subnetact.serving.simulation.datasets import load_trace, superserve_a40
from subnetact.serving.simulation.fluid import fluid_bound
from subnetact.serving.simulation.result import SimulationResult
from subnetact.serving.simulation.simulator import simulate
from subnetact.serving.simulation.traces import bursty, poisson, time_varying
from subnetact.serving.tenants.tenant_batcher import Tenant, TenantBatcher

__all__ = [
    "Answer",
    "Batcher",
    "BatcherStats",
    "CheapestFeasible",
    "Collector",
    "Context",
    "FairShares",
    "Fixed",
    "HullFit",
    "MaxAcc",
    "MaxBatch",
    "ModelSwitching",
    "Pipeline",
    "PipelineAnswer",
    "PipelineModel",
    "PipelinePlan",
    "Policy",
    "Preemptive",
    "Runner",
    "SimulationResult",
    "SlackFit",
    "Stage",
    "StageModel",
    "Tenant",
    "TenantBatcher",
    "bursty",
    "fluid_bound",
    "load_trace",
    "make_policy",
    "plan_pipeline",
    "poisson",
    "simulate",
    "superserve_a40",
    "time_varying",
]
