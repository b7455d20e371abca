"""Neural architecture search: which subnets are worth serving, and predictors of their accuracy and latency.

- `search`: the function `search` with `SearchResult` and `Candidate`. Import the function from
  `subnetact` or from `subnetact.nas.search`; here the name means the module.
- `nsga2`: proposes the subnets to evaluate next, and keeps those that were.
- `genes`: initial populations, crossover and mutation in any search space.
- `surrogate`: the Gaussian process that selects among many children.
- `accuracy_predictor`: `AccuracyPredictor`, once-for-all's published predictors.
- `latency_predictor`: `LatencyPredictor`, fitted to measured subnets; needs scipy.
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
