"""DistillationReport: what a distillation did for every subnet, on data that it was not trained on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from subnetact.files.documents import write_json
from subnetact.spec import SubnetSpec


@dataclass(frozen=True)
class DistillationReport:
    """What `distill_` did.

    Attributes:
        subnets: the subnets that were measured, the largest first.
        metric: what was measured, "perplexity" for example.
        before: its value per subnet on the held-out batches, before anything was changed.
        after: its value per subnet at the end.
        losses: the training losses over time, (step, largest, smallest, mean of the random subnets). That of
            the largest subnet is another function than those of the others, if it is the teacher.
        steps: the number of steps of the optimizer.
        seconds: the time that the training took, with earlier parts if it was resumed.
        order: what was sorted by importance before the training, or why nothing was.
        batches: the number of held-out batches that were measured.
    """

    subnets: tuple[SubnetSpec, ...]
    metric: str
    before: tuple[float, ...]
    after: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    steps: int
    seconds: float
    order: str
    batches: int

    def __str__(self) -> str:
        short = [str(spec) if len(str(spec)) <= 60 else f"{str(spec)[:57]}..." for spec in self.subnets]
        names = [f"{i}: {name}" for i, name in enumerate(short)]
        width = max(map(len, names))
        lines = [
            f"{self.steps} steps in {self.seconds:.0f} s; {self.metric}, {self.batches} held-out batches"
        ]
        lines += [f"{'subnet':<{width}}{'before':>12}{'after':>12}"]
        for name, before, after in zip(names, self.before, self.after, strict=True):
            lines.append(f"{name:<{width}}{before:>12.4g}{after:>12.4g}")
        return "\n".join([*lines, f"order: {self.order}"])

    def to_json(self) -> dict[str, Any]:
        """Return everything as values that JSON can hold; subnets as their keys."""
        rows = zip(self.subnets, self.before, self.after, strict=True)
        subnets = [{"subnet": spec.key, "before": b, "after": a} for spec, b, a in rows]
        losses = [list(entry) for entry in self.losses]
        facts = {name: getattr(self, name) for name in ("steps", "seconds", "order", "batches")}
        return {"metric": self.metric, "subnets": subnets, "losses": losses, **facts}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON; an earlier file is replaced as a whole.

        Args:
            path: the file.

        Raises:
            WriteError: the file cannot be written.
        """
        write_json(path, self.to_json())
