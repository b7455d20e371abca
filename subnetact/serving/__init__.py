"""Deadline-aware scheduling: a live batcher, policies, a simulator, bounds and planning.

Nothing here imports torch. Every public name is imported from this package.

Which folder answers which question (each imports only from those above it):

* `scheduling/`: which request leaves the queue first (`queue`), what a policy sees (`context`), how a
  policy's answer becomes a batch (`dispatch`), what happens to expired requests (`dispatch`, `priority`).
* `policies/`: which subnet and batch size an idle worker runs next; one file per policy.
* `live/`: `Batcher`, which serves requests from threads and asyncio, with its statistics and its log.
* `simulation/`: `simulate`, traces and data sets of arrivals, upper bounds, replays of live runs.
* `planning/`: how many workers a target needs (`plan`), when to add workers (`Tuner`), which streams of
  requests share workers (`group_streams`).
* `pipelines/`: `Pipeline`, stages behind each other under end-to-end deadlines, and their planning.
* `tenants/`: `TenantBatcher`, several supernets that share workers.
"""

from subnetact.serving.live.answers import Answer, AnswerFuture, Decided
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.live.corrections import Corrections, CorrectionsSnapshot
from subnetact.serving.live.histograms import HistogramSnapshot
from subnetact.serving.live.prometheus import Collector
from subnetact.serving.live.runner import Runner
from subnetact.serving.live.stats import BatcherStats
from subnetact.serving.pipelines.model import (
    PipelineEstimate,
    PipelineModel,
    StageChoice,
    StageEstimate,
    StageModel,
    estimate_pipeline,
)
from subnetact.serving.pipelines.pipeline import Pipeline, PipelineAnswer, PipelineStats, StageTime
from subnetact.serving.pipelines.planner import PipelinePlan, plan_pipeline
from subnetact.serving.pipelines.stage import Stage
from subnetact.serving.planning.herd import Grouping, Stream, group_streams
from subnetact.serving.planning.planner import Plan, plan, standard_candidates
from subnetact.serving.planning.tuner import Tuner, arrival_envelope
from subnetact.serving.policies import (
    CheapestFeasible,
    Coarse,
    Fixed,
    Flex,
    HullFit,
    MaxAcc,
    MaxBatch,
    ModelSwitching,
    Preemptive,
    RunningBatch,
    SlackFit,
    Tuning,
    Veltair,
    make_policy,
    policy_names,
)
from subnetact.serving.scheduling.context import ArrivalMeter, Context, Policy
from subnetact.serving.scheduling.fair_shares import FairShares
from subnetact.serving.simulation.datasets import (
    TRACES,
    load_trace,
    superserve_a40,
    trace_info,
    trace_series,
)
from subnetact.serving.simulation.fluid import fluid_bound
from subnetact.serving.simulation.optimum import exact_optimum
from subnetact.serving.simulation.replay import LiveRun
from subnetact.serving.simulation.result import Decision, RequestLog, SimulationResult
from subnetact.serving.simulation.simulator import CoRunner, WorkerEvent, simulate
from subnetact.serving.simulation.traces import (
    bursty,
    from_counts,
    from_timestamps,
    poisson,
    time_varying,
)
from subnetact.serving.tenants.tenant_batcher import Tenant, TenantBatcher, TenantStats

__all__ = [
    "TRACES",
    "Answer",
    "AnswerFuture",
    "ArrivalMeter",
    "Batcher",
    "BatcherStats",
    "CheapestFeasible",
    "CoRunner",
    "Coarse",
    "Collector",
    "Context",
    "Corrections",
    "CorrectionsSnapshot",
    "Decided",
    "Decision",
    "FairShares",
    "Fixed",
    "Flex",
    "Grouping",
    "HistogramSnapshot",
    "HullFit",
    "LiveRun",
    "MaxAcc",
    "MaxBatch",
    "ModelSwitching",
    "Pipeline",
    "PipelineAnswer",
    "PipelineEstimate",
    "PipelineModel",
    "PipelinePlan",
    "PipelineStats",
    "Plan",
    "Policy",
    "Preemptive",
    "RequestLog",
    "Runner",
    "RunningBatch",
    "SimulationResult",
    "SlackFit",
    "Stage",
    "StageChoice",
    "StageEstimate",
    "StageModel",
    "StageTime",
    "Stream",
    "Tenant",
    "TenantBatcher",
    "TenantStats",
    "Tuner",
    "Tuning",
    "Veltair",
    "WorkerEvent",
    "arrival_envelope",
    "bursty",
    "estimate_pipeline",
    "exact_optimum",
    "fluid_bound",
    "from_counts",
    "from_timestamps",
    "group_streams",
    "load_trace",
    "make_policy",
    "plan",
    "plan_pipeline",
    "poisson",
    "policy_names",
    "simulate",
    "standard_candidates",
    "superserve_a40",
    "time_varying",
    "trace_info",
    "trace_series",
]
