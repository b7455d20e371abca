"""Sends a trace to a batcher in the same process, in an open loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from open_loop import Refused, Reply, Sent, run_open_loop
from torch import Tensor

from subnetact import Batcher
from subnetact.errors import RequestError
from subnetact.serving import Answer

__all__ = ["ask_batcher"]


async def ask_batcher(
    batcher: Batcher,
    images: Sequence[Tensor],
    arrivals_ms: Sequence[float],
    slo_ms: float,
    min_accuracy: float | None = None,
    read: Callable[[int, Answer], Reply] | None = None,
) -> list[Sent]:
    """Send a trace to a batcher in this process.

    Args:
        batcher: the batcher.
        images: the inputs, without a batch dimension; request i sends `images[i % len(images)]`.
        arrivals_ms: times at which to send, ascending, in ms.
        slo_ms: time that a request is given, in ms.
        min_accuracy: minimum accuracy of the answering subnets, in percent. If None, any may answer.
        read: makes the reply to request i from its answer. If None, the label is the class with the largest
            score.

    Returns:
        One entry per request, in order.
    """

    async def send(i: int, left_ms: float) -> Reply:
        try:
            answer = await batcher.infer(images[i % len(images)], left_ms, min_accuracy=min_accuracy)
        except RequestError as error:
            raise Refused(type(error).__name__) from error
        if read is not None:
            return read(i, answer)
        return Reply(int(answer.output.argmax()), answer.subnet, answer.accuracy)

    return await run_open_loop(arrivals_ms, send, slo_ms)
