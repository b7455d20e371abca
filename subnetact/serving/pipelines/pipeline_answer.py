"""What a live pipeline answers, and where the time of a request went."""

# Annotations are not postponed here, so that tools can read the fields of the named tuples elsewhere.

from typing import Any, NamedTuple

__all__ = ["PipelineAnswer", "StageTime"]


class StageTime(NamedTuple):
    """Where the time of one input of a request went at one stage.

    Attributes:
        arrived_ms: when the input reached the stage, ms after the request was accepted.
        waited_ms: time in the queue of the stage, ms.
        ran_ms: time in the batch that answered, ms.
        subnet: id of the subnet that ran.
        accuracy: profiled accuracy of that subnet, in percent.
    """

    arrived_ms: float
    waited_ms: float
    ran_ms: float
    subnet: int
    accuracy: float


class PipelineAnswer(NamedTuple):
    """The answer to one request.

    Attributes:
        output: the output of the last stage; if several stages are last, a dictionary from their names to
            their outputs. Stages that the request did not take give None, or are left out of the dictionary.
        latency_ms: time from the submission to the answer, ms.
        met: whether the answer came within the deadline.
        stages: for every stage that the request took, one entry per input.
    """

    output: Any
    latency_ms: float
    met: bool
    stages: dict[str, list[StageTime]]
