"""Neural architecture search: which subnets are worth serving, and predictors of their accuracy and latency.

- `search`: the function `search` with `SearchResult` and `Candidate`. Import the function from
  `subnetact` or from `subnetact.nas.search`; here the name means the module.
- `nsga2`: proposes what to evaluate next, from the `genes` of parents, as the `surrogate` expects the best.
- `accuracy_predictor`, `latency_predictor`: once-for-all's predictors; one that is fitted to measurements.
- `evaluation`: `evaluate`, the true accuracy on labelled data.
"""

from subnetact.nas.accuracy_predictor import AccuracyPredictor
from subnetact.nas.evaluation import evaluate
from subnetact.nas.latency_predictor import LatencyPredictor, PredictionError
from subnetact.nas.search import Candidate, SearchResult

__all__ = [
    "AccuracyPredictor",
    "Candidate",
    "LatencyPredictor",
    "PredictionError",
    "SearchResult",
    "evaluate",
]
