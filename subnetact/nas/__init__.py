"""Neural architecture search: which subnets are worth serving, and predictors of their accuracy and latency.

Import the function `search` from `subnetact` or from `subnetact.nas.search`, which here names the module.
"""

from subnetact.nas.accuracy_predictor import AccuracyPredictor
from subnetact.nas.evaluation import evaluate
from subnetact.nas.latency_predictor import LatencyPredictor
from subnetact.nas.layer_scores import LayerScores, score_layers
from subnetact.nas.prediction_error import PredictionError
from subnetact.nas.search import Candidate, SearchResult

__all__ = [
    "AccuracyPredictor",
    "Candidate",
    "LatencyPredictor",
    "LayerScores",
    "PredictionError",
    "SearchResult",
    "evaluate",
    "score_layers",
]
