"""distill_: trains all subnets of a pretrained network that was made elastic, and says what it did."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.calibration.calibrate import calibrate
from subnetact.errors import InsertError, TrainingError, UncalibratedSubnetWarning
from subnetact.insertion.importance import Measure
from subnetact.insertion.reorder import reorder_
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import map_tensors, tensors_of
from subnetact.supernet.load import warn_of_dropped
from subnetact.supernet.norm_table import NormTable
from subnetact.supernet.supernet import Supernet, as_supernet
from subnetact.training.batch_stream import BatchStream, kept_random_states
from subnetact.training.measurement import Measurement
from subnetact.training.processes import agreed, copy_from_first_, rank_and_count
from subnetact.training.progress_bar import progress_bar
from subnetact.training.report import DistillationReport
from subnetact.training.run import TrainingRun, even_subnet
from subnetact.training.sandwich import IGNORED
from subnetact.training.state import TrainingState
from subnetact.training.stored_outputs import StoredOutputs
from subnetact.training.task import TASKS, Task

Function = Callable[[Any, Any], Any]

AUTO = "auto"
FROZEN = "frozen"
RANGES = {
    "clip": (1e-9, math.inf),
    "distillation": (0.0, 1.0),
    "learning_rate": (0.0, 1e3),
    "minutes": (1e-9, math.inf),
    "save_every_s": (0.0, math.inf),
}
SETTINGS = ("accumulate", "autocast", "balance", "clip", "distillation", "random_subnets", "seed")
"""The arguments that every step needs, and that must be the same again when a training is resumed."""
COURSE = ("minutes", "progress", "save_every_s", "scheduler", "steps")
"""The other arguments that a `TrainingRun` gets as they are."""
MEASURING = 0.05
"""The share of the minutes that measuring before and after may take, each."""
PASSAGE = 128
"""So many tokens of every batch say how important the units of a language model are."""
LEAST = {"accumulate": 1, "calibration": 1, "random_subnets": 0, "seed": 0, "steps": 1}


def distill_(
    supernet: Supernet,
    batches: Iterable[Any],
    teacher: Callable[..., Any] | str | None = None,
    *,
    held_out: Iterable[Any],
    steps: int | None = None,
    minutes: float | None = None,
    task: str = "classes",
    labels: bool | None = None,
    subnets: Sequence[SubnetSpec] | None = None,
    importance: str | Measure | None = AUTO,
    learning_rate: float = 3e-4,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    clip: float = 1.0,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    random_subnets: int = 2,
    distillation: float = 1.0,
    divergence: Function | None = None,
    balance: bool = False,
    loss: Function | None = None,
    metric: Function | None = None,
    output: Function | None = None,
    calibration: int = 8,
    stored: str | PathLike[str] | None = None,
    resume: str | PathLike[str] | None = None,
    save_every_s: float | None = None,
    seed: int = 0,
    progress: bool = True,
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
        steps: the number of steps of the optimizer. Give either this or `minutes`.
        minutes: the time of everything, with earlier parts if it is resumed: measuring, sorting, the steps,
            and measuring in the end, which is reckoned to take as long as at first. Each time, as many
            held-out batches are measured as a twentieth of it allows, at least one. The steps get one
            half of the minutes at least, and the last one is not cut short.
        task: what the network returns. "classes": scores (N, classes), or (N, classes, H, W) of pixels, where
            the label -100 does not count; "values": numbers; "vectors": embeddings (N, features), or
            (N, tokens, features), which are averaged over the tokens that `attention_mask` keeps; "tokens":
            scores (N, tokens, vocabulary) of a language model.
        labels: whether batches are pairs (inputs, labels); dictionaries may have the entry "labels" instead.
            Without labels, subnets learn from the teacher alone. If None, True for classes and values. For
            tokens without labels, the inputs, or their `input_ids`, are the labels: every token but
            the first one is predicted from those before it, unless `attention_mask` is 0 or the label -100.
        subnets: the subnets that are measured and calibrated. If None, five from the largest to the smallest.
            They do not decide what is trained.
        importance: how to sort first; see `reorder_`. "taylor" uses the first `calibration` batches. None for
            a supernet whose narrow subnets were trained before: they would be lost. "auto": what can be
            sorted, by "taylor" for tokens and else by "l1", but nothing in supernets of published families.
        learning_rate: the highest one of AdamW, which rises for 5 % of the training and then falls to 0 like
            a cosine; if `optimizer` is None.
        optimizer: of the parameters of the supernet, new; `scheduler` may change its learning rate.
        scheduler: an object whose `step` is called after every step of `optimizer`.
        clip: the largest norm of the gradients; larger ones are scaled down.
        accumulate: the number of batches per step of the optimizer.
        autocast: torch.bfloat16 or torch.float16 to compute in 16 bits what torch's autocast allows; the
            weights stay as they are. With float16, gradients are scaled.
        random_subnets: the number of random subnets per step.
        distillation: share, from 0 to 1, of the teacher in the loss of those that learn from it; the rest are
            the labels.
        divergence: what subnets minimise to be like the teacher, a function of the two outputs. If None, the
            cross-entropy for scores, the squared error for values, and one minus the cosine for vectors.
            Scores of classes are the teacher's in both where a label does not count.
        balance: whether the losses of all subnets are scaled to that of the first one, so that a bad subnet
            does not dominate the shared weights.
        loss: a function of outputs and labels instead of the one of the task: cross-entropy or squared error.
        metric: a function of outputs and labels for the report, whose mean over samples is shown, or an
            object with `update(outputs, labels)` and `compute()`, such as a metric of torchmetrics, which is
            copied for every subnet. Without labels, it gets the teacher's outputs.
        output: a function of what the network returns and of the inputs, which returns the tensor that is
            learnt. If None, the network's `logits` or `out`, or the first of several outputs.
        calibration: the number of training batches for BatchNorm statistics and for "taylor".
        stored: a folder for the outputs of a teacher that does not change: it runs in the first epoch, and
            later ones, of this call and of others with the same batches, read what it returned. A file per
            batch has the outputs as they were, 4 bytes per score, or 2 with `autocast`: 200 MB for 1000
            tokens of 50000. Batches are known by their content, and others run the teacher again, so give
            a list, or a DataLoader that neither shuffles nor changes its samples. Remove the folder yourself.
        resume: a file for unfinished work. If it exists, the training goes on from there, and the report
            is that of an uninterrupted run, up to rounding. Begin with the same supernet, untrained, and
            the same batches in the same order. Batches of an unfinished epoch are read once more.
        save_every_s: the time in seconds between two writes of `resume`, which has the size of the weights
            and the state of the optimizer. If None, 60, or so many that a twentieth of the time goes into
            writing. If the disk is full, the training warns, goes on and tries again.
        seed: decides the random subnets and seeds torch, NumPy and `random`, whose states are kept.
        progress: if True, show on standard error what is done and how far it is, with the losses: as bars
            on a terminal, elsewhere as a line every 20 seconds.

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
    arguments, began = dict(locals()), time.perf_counter()
    supernet = as_supernet(supernet)
    settings = {name: arguments[name] for name in SETTINGS}
    names = {name: _name(arguments[name]) for name in ("divergence", "importance", "loss", "task")} | {
        "learning_rate": learning_rate if optimizer is None else None,
        "optimizer": _name(type(optimizer)),
        "teacher": teacher if isinstance(teacher, str | None) else "a network",
    }
    _check_numbers({**arguments, **names})
    _check_names(task, autocast, teacher)
    stateful = hasattr(metric, "update") and hasattr(metric, "compute")
    for name in ("divergence", "loss", "output", *(() if stateful else ("metric",))):
        if not (arguments[name] is None or callable(arguments[name])):
            raise TrainingError(f"{name}: {arguments[name]!r} is no function")
    _check_data(batches, held_out, resume)
    meaning = Task(task, task in TASKS[:2] if labels is None else labels, output, loss, divergence, metric)
    learns = meaning.labels or task == "tokens"
    if not learns and distillation < 1.0:
        raise TrainingError(f"distillation: {distillation} needs labels; without them, it is 1.0")
    space, device = supernet.space, supernet.device
    even = (even_subnet(space, share) for share in (1.0, 0.75, 0.5, 0.25, 0.0))
    specs = list(dict.fromkeys(even)) if subnets is None else supernet.space.distinct(subnets, "distill_")
    parameters = [parameter for parameter in supernet.parameters() if parameter.requires_grad]
    if not parameters:
        raise TrainingError("no parameter of the supernet requires gradients; call supernet.requires_grad_()")
    if optimizer is not None:
        _check_optimizer(optimizer, parameters)
    rank, processes = rank_and_count()
    progress = arguments["progress"] = progress and rank == 0
    copy_from_first_([*supernet.parameters(), *supernet.buffers()])
    chosen: Any = FROZEN if teacher is None and not learns else teacher
    former = supernet.norms.to_like(None)
    with _kept_modes(chosen), _kept_modes(supernet) as modes, kept_random_states(device):
        first = [meaning.split(batch, device) for batch in _first(batches, calibration, seed)]
        inputs = [x for x, _ in first]
        given = None if isinstance(chosen, str) else chosen
        measurement = Measurement(supernet, specs, held_out, meaning, given, inputs, progress)
        measurement.check(first[0][1])
        if isinstance(chosen, str):  # Its statistics may be those of other weights.
            calibrate(supernet, [space.largest()], inputs, progress=progress)
            chosen = supernet.extract(space.largest()).eval().requires_grad_(False)
            measurement.teacher = chosen
        outputs = None
        if stored is not None:
            taught = chosen if distillation or not learns else None
            outputs = StoredOutputs(stored, taught, meaning, f"{device.type} {autocast}")
        scaler = torch.amp.GradScaler(device.type, enabled=autocast is torch.float16)
        run = TrainingRun(
            supernet=supernet,
            stream=BatchStream(batches, seed, rank, processes),
            processes=processes,
            task=meaning,
            teacher=chosen,
            stored=outputs,
            learns=learns,
            optimizer=optimizer or torch.optim.AdamW(parameters, learning_rate),
            scaler=scaler,
            rate=learning_rate if optimizer is None else None,
            **{name: arguments[name] for name in (*SETTINGS, *COURSE)},
        )
        keys = blake2b("\n".join(spec.key for spec in specs).encode(), digest_size=8).hexdigest()
        weights = "" if resume is None else supernet.fingerprint()
        environment = {**settings, "autocast": str(autocast), **names, "subnets": keys, "weights": weights}
        kept = {"scheduler": scheduler} if scheduler is not None else {}
        if scaler.is_enabled():
            kept["scaler"] = scaler
        state = TrainingState(resume, environment, supernet, run.optimizer, kept)
        done = state.load()
        if done is None:
            try:
                before = measurement.run(60 * MEASURING * (minutes or math.inf))
                order = _sort(supernet, importance, first, meaning, progress)
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
        metric=meaning.metric,
        before=tuple(facts["before"]),
        after=tuple(after),
        losses=tuple(tuple(entry) for entry in facts["losses"]),
        steps=facts["step"],
        seconds=facts["seconds"],
        order=facts["order"],
        batches=facts["batches"],
    )


# -- arguments -----------------------------------------------------------------------------------------


def _check_numbers(given: dict[str, Any]) -> None:
    if (given["steps"] is None) == (given["minutes"] is None):
        raise TrainingError("give either steps or minutes, to say how long to train")
    for name, (least, most) in RANGES.items():
        value = given[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and least <= value <= most):
            raise TrainingError(f"{name}: {value!r} is no number from {least:g} to {most:g}")
    for name, least in LEAST.items():
        value = given[name]
        if value is not None and (type(value) is not int or value < least):
            raise TrainingError(f"{name}: {value!r} is no whole number of at least {least}")


def _check_names(task: Any, autocast: Any, teacher: Any) -> None:
    if task not in TASKS:
        raise TrainingError(f"task: {task!r} is unknown; choose from {', '.join(TASKS)}")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise TrainingError(f"autocast: {autocast!r}; choose torch.bfloat16, torch.float16 or None")
    if not (teacher is None or callable(teacher) or teacher == FROZEN):
        raise TrainingError(f'teacher: {teacher!r}; give a network, "frozen" or None')


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


def _name(given: Any) -> Any:
    """Return the name of a function or class, for comparisons between two runs."""
    return getattr(given, "__qualname__", given if isinstance(given, str | None) else type(given).__name__)


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
        bar = progress_bar(None, f"sorting by {_name(measure)}", progress, total=1)
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
    return f"{len(report.reordered)} groups sorted by {_name(measure)}{rest}"


def _passage(x: Any, labels: Tensor) -> tuple[Any, Tensor]:
    """Return the passage of a batch of texts with the most tokens to predict, where it can be taken alone."""
    length = min(labels.shape[1] - 1, PASSAGE)
    if not length or any(isinstance(t, Tensor) and t.shape[:2] != labels.shape for t in tensors_of(x)):
        return x, labels
    counts = (labels[:, 1:] != IGNORED).unfold(1, length, length).sum(2)
    row, at = divmod(int(counts.argmax()), counts.shape[1])
    cut = slice(row, row + 1), slice(at * length, (at + 1) * length + 1)
    return map_tensors(lambda t: t[cut], x), labels[cut]
