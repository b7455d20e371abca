"""distill_: trains all subnets of a pretrained network that was made elastic, measures them, and reports."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.calibration.calibrate import calibrate
from subnetact.errors import InsertError, TrainingError, UncalibratedSubnetWarning
from subnetact.insertion.reorder import reorder_
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import call_with, describe_input, map_tensors, tensors_of
from subnetact.supernet.failure import explained
from subnetact.supernet.load import warn_of_dropped
from subnetact.supernet.norm_table import NormTable
from subnetact.supernet.supernet import Supernet, as_supernet
from subnetact.training.batch_stream import BatchStream, kept_random_states
from subnetact.training.processes import agreed, copy_from_first_, rank_and_count
from subnetact.training.progress_bar import progress_bar
from subnetact.training.report import DistillationReport
from subnetact.training.run import TrainingRun, even_subnet
from subnetact.training.sandwich import IGNORED
from subnetact.training.settings import AUTO, Distillation, name_of
from subnetact.training.state import TrainingState
from subnetact.training.task import Task, number

FROZEN = "frozen"
MEASURING = 0.05
"""The share of the minutes that measuring before and after may take, each."""
FIRST_BATCH = "a batch is what the network takes or, unless labels=False, a pair (inputs, labels)"
PASSAGE = 128
"""So many tokens of every batch say how important the units of a language model are."""


def distill_(
    supernet: Supernet,
    batches: Iterable[Any],
    teacher: Callable[..., Any] | str | None = None,
    *,
    held_out: Iterable[Any],
    **options: Any,
) -> DistillationReport:
    """Train all subnets of a pretrained network in place: what narrow subnets lost, they learn again.

    Channels, heads and neurons are sorted by importance first. Every step then trains the largest subnet, the
    smallest and some random ones (the sandwich rule), of which one half have about the same relative size
    everywhere. The largest subnet learns from the labels and is the teacher of the others. Where the
    network has BatchNorm, the measured subnets are calibrated in the end. Statistics of others are dropped
    with an `UncalibratedSubnetWarning`, because they are those of the former weights.

    Under torchrun, with a process group, every process trains on its share of the same `batches`, from
    the weights of the first one on, and gradients are averaged. All return the same report; the first one
    alone shows bars and writes `resume`.

    Args:
        supernet: the supernet.
        batches: the training data, which can be read again: a DataLoader or a list, not a generator. See
            `task` and `labels`. torch, NumPy and `random` are seeded before every batch.
        teacher: a network to learn from, called with the inputs, which does not change. "frozen": a copy of
            the largest subnet as it is now. With either, the largest subnet learns from the teacher, too. If
            None, the largest subnet is the teacher, or "frozen" where there are no labels. The docstring of
            `subnetact.training` says when a teacher that moves does harm.
        held_out: other batches of the same kind, on which the subnets are measured, as a list.
        options: those of `Distillation`: `steps` or `minutes`, and what else is not as usual.

    Returns:
        The metric of the subnets before and after, and the losses.

    Raises:
        TrainingError: an argument is out of its range; a batch has no labels where they are needed, or others
            than the outputs need; the teacher does not run, or returns other outputs than the supernet; or a
            loss or a gradient is not finite. The weights are then those after the last good step, and so is
            the file of `resume`.
        SpecError: a subnet is not of this supernet, or outputs do not fit the task.
        InsertError: a subnet does not run in training mode, or `importance` was given and nothing can be
            sorted.
        ResumeMismatch: the file of `resume` is of another supernet, of other batches or arguments.
        FileFormatError: the file of `resume` is damaged, or of another kind.
        WriteError: the file of `resume` cannot be written at the beginning.

    Source:
        Sandwich rule: US-Nets (ICCV'19); balancing: AmoebaLLM (NeurIPS'24).

    Example:
        >>> supernet = subnetact.insert_(model.eval(), example=x)
        >>> report = distill_(supernet, loader, held_out=others, minutes=30, resume="state.safetensors")
        >>> print(report)
    """
    began, supernet, settings = time.perf_counter(), as_supernet(supernet), Distillation(**options)
    if not (teacher is None or callable(teacher) or teacher == FROZEN):
        raise TrainingError(f'teacher: {teacher!r}; give a network, "frozen" or None')
    _check_data(batches, held_out, settings.resume)
    task, space, device = settings.meaning, supernet.space, supernet.device
    specs = list(dict.fromkeys(even_subnet(space, share) for share in (1.0, 0.75, 0.5, 0.25, 0.0)))
    if settings.subnets is not None:
        specs = supernet.space.distinct(settings.subnets, "distill_")
    if settings.trained is not None:
        settings = replace(settings, trained=supernet.space.distinct(settings.trained, "distill_: trained="))
    parameters = [parameter for parameter in supernet.parameters() if parameter.requires_grad]
    if not parameters:
        raise TrainingError("no parameter of the supernet requires gradients; call supernet.requires_grad_()")
    if settings.optimizer is not None:
        _check_optimizer(settings.optimizer, parameters)
    settings = replace(settings, progress=settings.progress and rank_and_count()[0] == 0)
    copy_from_first_([*supernet.parameters(), *supernet.buffers()])
    chosen: Any = FROZEN if teacher is None and not task.learns else teacher
    former = supernet.norms.to_like()
    with _kept_modes(chosen), _kept_modes(supernet) as modes, kept_random_states(device):
        first = [task.split(batch, device) for batch in _first(batches, settings.calibration, settings.seed)]
        inputs = [x for x, _ in first]
        given = None if isinstance(chosen, str) else chosen
        measurement = Measurement(supernet, specs, held_out, task, given, inputs, settings.progress)
        measurement.check(first[0][1])
        if isinstance(chosen, str):  # Its statistics may be those of other weights.
            calibrate(supernet, [space.largest()], inputs, progress=settings.progress)
            chosen = supernet.extract(space.largest()).eval().requires_grad_(False)
            measurement.teacher = chosen
        run = TrainingRun(supernet, settings, batches, task, chosen)
        environment = {
            **settings.to_json(),
            "teacher": teacher if isinstance(teacher, str | None) else "a network",
            "subnets": [spec.key for spec in specs],
            "weights": "" if settings.resume is None else supernet.fingerprint(),
        }
        others = {} if settings.scheduler is None else {"scheduler": settings.scheduler}
        others["scaler"] = run.scaler
        state = TrainingState(settings.resume, environment, supernet, run.optimizer, others)
        done = state.load()
        if done is None:
            try:
                before = measurement.run(60 * MEASURING * (settings.minutes or math.inf))
                order = _sort(supernet, settings.importance, first, task, settings.progress)
            except BaseException:
                supernet.norms = former  # Those that it has now were to measure.
                raise
            run.facts = {"step": 0, "seconds": 0.0, "losses": [], "before": before, "order": order}
            run.facts["batches"] = measurement.batches
            run.facts["others"] = time.perf_counter() - began + measurement.seconds
            state.save({**run.facts, "stream": run.stream.facts()})
            run.facts["others"] = agreed(run.facts["others"] + state.cost_s)
        else:
            run.stream.go_to(done.pop("stream"))
            run.facts = done
            measurement.batches = done["batches"]
        supernet.norms = NormTable(space.id)
        supernet.train()
        for module, training in modes.items() if any(modes.values()) else ():
            module.training = training or module is supernet  # The others are frozen.
        run.go_on(state)
        supernet.eval()
        copy_from_first_(supernet.buffers())
        after = measurement.run()
    warn_of_dropped(sum(spec not in supernet.norms for spec in former), "name them in subnets=")
    facts = agreed(run.facts)
    return DistillationReport(
        subnets=tuple(specs),
        metric=task.metric,
        before=tuple(facts["before"]),
        after=tuple(after),
        losses=tuple(tuple(entry) for entry in facts["losses"]),
        steps=facts["step"],
        seconds=facts["seconds"],
        order=facts["order"],
        batches=facts["batches"],
    )


@dataclass
class Measurement:
    """Measures `specs` on `held_out`, always on as many batches as the first time.

    `inputs` are training inputs for BatchNorm statistics. The last time took so many `seconds`.
    """

    supernet: Supernet
    specs: Sequence[SubnetSpec]
    held_out: Iterable[Any]
    task: Task
    teacher: Callable[..., Any] | None
    inputs: Sequence[Any]
    progress: bool
    batches: int | None = None
    seconds: float = 0.0

    @torch.no_grad()
    def check(self, labels: Any) -> None:
        """Refuse a first batch, its labels or a teacher that do not fit the supernet."""
        teacher = self.teacher
        own = {parameter.data_ptr() for parameter in self.supernet.parameters()}
        if any(p.data_ptr() in own for p in getattr(teacher, "parameters", list)()):
            raise TrainingError(
                "teacher: shares weights with the supernet, so it moves with the training; give "
                'teacher="frozen", a copy.deepcopy made before insert_, or None for in-place distillation'
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncalibratedSubnetWarning)
            found = self._output("the supernet", self.supernet)
        if labels is not None:
            self.task.loss(found, labels)
        if teacher is None:
            return
        wanted = self._output("teacher", teacher)
        if isinstance(found, Tensor) and (not isinstance(wanted, Tensor) or wanted.shape != found.shape):
            raise TrainingError(
                f"teacher: returns {describe_input(wanted)}, the supernet {describe_input(found)}; give a "
                "teacher of the same outputs, or output=, a function that makes them alike"
            )

    def _output(self, name: str, network: Callable[..., Any]) -> Any:
        x = self.inputs[0]
        with explained(TrainingError, name, network, x, FIRST_BATCH):
            found = call_with(network, x)
        return self.task.output(found, x)

    def run(self, limit_s: float = math.inf) -> list[float]:
        """Calibrate every subnet, and return its metric; the first time, end before a limit if possible."""
        supernet, task, progress = self.supernet, self.task, self.progress
        calibrate(supernet, self.specs, self.inputs, progress=progress)
        views = [supernet.subnet(spec) for spec in self.specs]
        meters = [task.meter() for _ in views]
        read, began, total = 0, time.perf_counter(), self.batches or length_hint(self.held_out) or None
        bar = progress_bar(f"measuring {len(views)} subnets", progress, total=total)
        with torch.inference_mode(), bar:
            for read, batch in enumerate(islice(self.held_out, self.batches), 1):
                x, labels = task.split(batch, supernet.device)
                if labels is None:
                    assert self.teacher is not None
                    labels = task.output(call_with(self.teacher, x), x)
                for view, meter in zip(views, meters, strict=True):
                    meter.update(task.output(call_with(view, x), x), labels)
                bar.update()
                next_s = (time.perf_counter() - began) * (read + 1) / read
                if self.batches is None and limit_s < math.inf and agreed(next_s > limit_s):
                    break
        if not read:
            raise TrainingError("held_out: there is no batch; give at least one")
        self.batches, self.seconds = read, time.perf_counter() - began
        return [number(meter.compute()) for meter in meters]


# -- arguments -----------------------------------------------------------------------------------------


def _check_data(batches: Any, held_out: Any, resume: Any) -> None:
    for name, given in (("batches", batches), ("held_out", held_out)):
        if not isinstance(given, Iterable) or isinstance(given, Iterator | Tensor | str):
            raise TrainingError(
                f"{name}: expected a DataLoader or a list of batches, which can be read again, got "
                f"{type(given).__name__}; of a generator, make a list"
            )
    if resume is not None and getattr(batches, "persistent_workers", False):
        raise TrainingError(
            "resume: the random numbers of persistent workers depend on all earlier epochs, so a later run "
            "cannot read the same batches; give the DataLoader persistent_workers=False"
        )
    if batches is held_out:
        raise TrainingError("held_out is the training data; measure on other data, or figures say nothing")


def _check_optimizer(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not held.intersection(map(id, parameters)):
        raise TrainingError("optimizer: holds no parameter of the supernet; give it supernet.parameters()")
    if optimizer.state:
        raise TrainingError(
            "optimizer: has a state of earlier steps, which belongs to the former order of channels; make it "
            "anew, or go on with resume="
        )


@contextmanager
def _kept_modes(network: Any) -> Iterator[dict[nn.Module, bool]]:
    """Put a network, if it is a module, into evaluation mode, and later all parts back into their modes."""
    network = network if isinstance(network, nn.Module) else nn.Module()
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield modes
    finally:
        network.train(modes[network])
        for module, training in modes.items():
            module.training = training


def _first(batches: Iterable[Any], count: int, seed: int) -> list[Any]:
    """Return the first batches of an epoch, always the same ones."""
    stream, found = BatchStream(batches, seed), list[Any]()
    while len(found) < count:
        batch = stream.next()
        if stream.epoch:  # There are no more.
            break
        found.append(batch)
    return found


def _sort(
    supernet: Supernet, importance: Any, first: Sequence[tuple[Any, Any]], task: Task, progress: bool
) -> str:
    """Sort by importance; return what was sorted, or why nothing was."""
    if importance is None or (importance == AUTO and supernet.origin is not None):
        return "kept as it was"

    def loss(found: Any, given: tuple[Any, Any]) -> Tensor:
        x, labels = given
        return task.loss(task.output(found, x), labels)

    usual = "taylor" if task.name == "tokens" else "l1"
    measure = usual if importance == AUTO else importance
    try:
        bar = progress_bar(f"sorting by {name_of(measure)}", progress, total=1)
        with bar, warnings.catch_warnings():  # The statistics that it drops are made again.
            warnings.simplefilter("ignore", UncalibratedSubnetWarning)
            few = [_passage(*pair) for pair in first] if task.name == "tokens" else first
            batches = [(x, (x, labels)) for x, labels in few]
            report = reorder_(supernet, measure, batches=batches, loss=loss, output=lambda found: found)
            bar.update()
    except InsertError as error:
        if importance != AUTO:
            raise
        return f"kept as it was, because {error}"
    rest = f", {len(report.kept)} kept as they were" if report.kept else ""
    return f"{len(report.reordered)} groups sorted by {name_of(measure)}{rest}"


def _passage(x: Any, labels: Tensor) -> tuple[Any, Tensor]:
    """Return the passage of a batch of texts with the most tokens to predict, where it can be taken alone."""
    length = min(labels.shape[1] - 1, PASSAGE)
    if not length or any(isinstance(t, Tensor) and t.shape[:2] != labels.shape for t in tensors_of(x)):
        return x, labels
    counts = (labels[:, 1:] != IGNORED).unfold(1, length, length).sum(2)
    row, at = divmod(int(counts.argmax()), counts.shape[1])
    cut = slice(row, row + 1), slice(at * length, (at + 1) * length + 1)
    return map_tensors(lambda t: t[cut], x), labels[cut]
