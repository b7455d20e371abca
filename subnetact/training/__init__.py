"""Training of a supernet: `distill_` does all of it, `sandwich_step` one step for a loop of your own.

- `distillation.py`: the steps of `distill_`, in their order, and how subnets are measured.
- `settings.py`: the options of `distill_`.
- `task.py`: what batches hold, what outputs mean, and how well a subnet does.
- `sandwich.py`: the gradients of one batch, for several subnets.
- `trainer.py`: a Trainer of transformers that trains all subnets.
- `batch_stream.py`: which batch comes next, also after a kill; `state.py`: the file with which it goes on.
- `progress_bar.py`: bars, or lines in a log.
- `report.py`: what the training did for every subnet.

A teacher that moves
--------------------
With in-place distillation, the largest subnet is the teacher and learns at the same time. That is right while
it learns from labels: it gets better, and the others follow. It goes wrong where its own loss is poor: on few
data it overfits, and takes all subnets along; without labels nothing holds it, so there a frozen copy of
the largest subnet is the teacher. `teacher="frozen"` asks for it where there are labels: the largest subnet
then stays near what it was, and gains nothing from the data.
"""

from subnetact.training.distillation import distill_
from subnetact.training.report import DistillationReport
from subnetact.training.sandwich import sandwich_step
from subnetact.training.settings import Distillation
from subnetact.training.trainer import SandwichTraining

__all__ = ["Distillation", "DistillationReport", "SandwichTraining", "distill_", "sandwich_step"]
