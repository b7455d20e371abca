"""calibrate: fills `supernet.norms` with the BatchNorm statistics of subnets on real data."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from subnetact import __version__
from subnetact.calibration.corrections import CorrectionRun
from subnetact.calibration.run import CalibrationRun
from subnetact.errors import SpecError, StaleWeights
from subnetact.files.documents import StrPath, checksum
from subnetact.files.journal import Journal
from subnetact.operators.subnet_norm import CALIBRATION_RULES
from subnetact.spec import FLOAT32, SubnetSpec
from subnetact.supernet.batches import as_batch, as_pair, describe_input, hash_of, map_tensors, tensors_of
from subnetact.supernet.check import check_once
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.statistics import adopt_statistics_, batch_norms
from subnetact.supernet.supernet import Supernet, as_supernet

PROGRESS = "progress"
"""The only record of the journal of a calibration: the averages so far, and the checksum of the batches."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CalibrationReport:
    """What a calibration did.

    Attributes:
        subnets: the number of subnets that were calibrated.
        batches: the number of batches that their statistics average.
        layers_computed: the number of calls of layers (modules without submodules) that were made.
        layers_alone: the number that the same subnets and batches would have taken without sharing.
        kept_mb: the most that was kept of one subnet's forward pass for later subnets, in MiB.
        seconds: the time that the calibration took, with earlier parts if it was resumed.
        adopted: the largest subnet, if it got the statistics that the network came with; otherwise nothing.
        corrected: for each subnet that was to get corrections, the number of layers that have one.
    """

    subnets: int = 0
    batches: int = 0
    layers_computed: int = 0
    layers_alone: int = 0
    kept_mb: float = 0.0
    seconds: float = 0.0
    adopted: tuple[SubnetSpec, ...] = ()
    corrected: Mapping[SubnetSpec, int] = field(default_factory=dict)

    @property
    def saved(self) -> float:
        """The share of the module calls that sharing saved, from 0 to 1."""
        return 1 - self.layers_computed / self.layers_alone if self.layers_alone else 0.0

    def __str__(self) -> str:
        largest = "; the largest subnet keeps the statistics that the network came with" * bool(self.adopted)
        shared = f"{self.saved:.0%} of the layers were shared{largest}"
        if self.corrected:
            least, most = min(self.corrected.values()), max(self.corrected.values())
            shared = f"corrections of {least} to {most} layers"
        return f"{self.subnets} subnets on {self.batches} batches in {self.seconds:.1f} s; {shared}"


def calibrate(
    supernet: Supernet,
    specs: Iterable[SubnetSpec],
    batches: Iterable[Tensor | Sequence[Any] | Mapping[str, Tensor]],
    progress: bool = True,
    rule: str | None = None,
    *,
    resume: StrPath | None = None,
    save_every_s: float = 10.0,
    memory_mb: float = 1024.0,
    check: bool = True,
    adopt: bool | None = None,
    labels: bool = False,
    corrections: int = 0,
) -> CalibrationReport:
    """Fill `supernet.norms` with the BatchNorm statistics of every given subnet, in one pass over the data.

    Subnets do not affect each other, and `supernet.norms` changes only if the whole pass succeeds and the
    weights are still those that it began with. The docstring of `subnetact.calibration` says how statistics
    are averaged, which layers subnets share and how memory is bounded.

    Args:
        supernet: the supernet; only its norm table changes.
        specs: the subnets. Subnets that have statistics already get new ones. A subnet at a lower precision
            uses, and gets, the statistics of the same subnet at float32.
        batches: what the network takes, like what is to be served: tensors of shape (N, C, H, W) for images,
            tuples of positional arguments, or dictionaries of named ones; see `labels`. Their sizes may
            differ. They are read once. Some hundreds of inputs of all classes, in batches of at least 8, are
            enough: a batch of one shows no differences between inputs, which costs accuracy.
        progress: if True, show a progress bar when standard error is a terminal.
        rule: `weighted_biased` or `cumulative_unbiased`. If None, the rule of the supernet's family is used,
            which is `weighted_biased` for an own network.
        resume: a file for unfinished work. If it exists, the work goes on from there, and the statistics are
            those of an uninterrupted run, bit for bit. Give the same batches again, in the same order. If
            None, nothing is saved.
        save_every_s: the time in seconds between two writes of `resume`. A write waits until the current
            subnet has taken its batch; 0 writes after every subnet and batch.
        memory_mb: how much of one subnet's forward pass may be kept for later subnets, in MiB. What does not
            fit is computed again; the statistics are the same. The forward pass of one subnet comes on top.
        check: whether to run `supernet.check` on the first input, once per supernet.
        adopt: whether the largest subnet, if it is among the given ones, gets the statistics that the network
            came with instead of new ones. If None, it does if the network was pretrained and has not changed
            since `insert_`; its outputs are then those of the original network, bit for bit.
        labels: whether batches are pairs (inputs, labels), as a DataLoader of images and labels gives them.
            Only the inputs are used.
        corrections: for networks without BatchNorm, the rank of the corrections that every narrower subnet
            gets (16 is usual): behind linear layers whose outputs are added to a stream, and in the place of
            skipped layers, what the stream lacks there against the largest subnet, by ridge regression. All
            batches run together, and what the largest subnet computes there is kept meanwhile. If 0, none.

    Returns:
        What was calibrated, and what sharing saved.

    Raises:
        SpecError: a specification is not of this supernet, an argument is out of its range, there are no
            batches, a batch is a pair without `labels=True` and the network takes one argument, the network
            does not run on a batch, or statistics are not finite.
        InsertError: a subnet does not run on a batch on which the largest subnet runs, because the elastic
            description lacks a module, or `supernet.check` fails; the message names the module.
        StaleWeights: the weights have changed since the calibration began; nothing of it is kept.
        ResumeMismatch: `resume` is of other weights, subnets, data or settings.
        FileFormatError: `resume` is damaged, of another kind, or of a newer schema.

    Source:
        SubnetNorm in SuperServe, section 3.1.

    Example:
        >>> specs = supernet.space.sample(0, 20)
        >>> report = subnetact.calibrate(supernet, specs, loader, labels=True)
        >>> supernet.norms.save("norms.safetensors")
    """
    if rule is not None and rule not in CALIBRATION_RULES:
        raise SpecError(f"{rule!r} is no calibration rule; choose from {', '.join(CALIBRATION_RULES)}")
    for name, value in (("memory_mb", memory_mb), ("save_every_s", save_every_s)):
        if not value >= 0:
            raise SpecError(f"{name}: {value!r} is no number of at least 0")
    if not isinstance(labels, bool):
        raise SpecError(f"labels: {labels!r} is no truth value; True says that batches are (inputs, labels)")
    as_supernet(supernet)
    lists: tuple[Any, ...] = specs, batches
    if any(isinstance(x, SubnetSpec | Tensor | str) or not isinstance(x, Iterable) for x in lists):
        raise SpecError("calibrate takes lists of specifications and of batches; write [spec] and [batch]")
    space = supernet.space  # Subnets that differ in their precision only share the statistics of float32.
    wanted = list(dict.fromkeys(space.at_precision(space.check(spec), FLOAT32) for spec in specs))
    if type(corrections) is not int or corrections < 0:
        raise SpecError(f"corrections: {corrections!r} is no rank, a whole number of at least 0")
    if corrections and resume is not None:
        raise SpecError("resume: the one pass of corrections cannot be resumed; leave out resume")
    if corrections and batch_norms(supernet.network):
        raise SpecError("corrections: they are for networks without BatchNorm, and this one has some")
    if not wanted or not (batch_norms(supernet.network) or corrections):
        return CalibrationReport(len(wanted))
    largest, inputs = space.largest(), partial(_inputs, supernet=supernet, labels=labels)
    with supernet.generation.lock:
        began = supernet.generation.moment()

    def require() -> None:
        if not supernet.generation.moment().same_weights(began):
            raise StaleWeights(
                "calibration: the weights have changed since it began, so its statistics belong to no "
                "weights; nothing was written, calibrate again on the present ones"
            )

    if corrections:
        start, narrow = time.perf_counter(), [spec for spec in wanted if spec != largest]
        given = list(map(inputs, batches))
        if not given:
            raise SpecError("calibration needs at least one batch, got none; a generator is read only once")
        with torch.inference_mode(False), torch.no_grad():
            fitting = CorrectionRun(supernet, given, corrections)
            bar = tqdm(narrow, "correcting subnets", disable=not progress or None, leave=None)
            measured = {spec: fitting.corrections(spec) for spec in bar}
        with supernet.generation.lock:
            require()
            supernet.norms.drop(narrow)
            supernet.norms.update({spec: NormRow.of({}, own) for spec, own in measured.items() if own})
        layers, seconds = {spec: len(own) for spec, own in measured.items()}, time.perf_counter() - start
        return CalibrationReport(len(narrow), len(given), seconds=seconds, corrected=layers)
    adopted: tuple[SubnetSpec, ...] = ()
    with torch.inference_mode(False), torch.no_grad():
        with supernet.generation.lock:
            if largest in wanted and (supernet.generation.is_original if adopt is None else adopt):
                adopted = (largest,)
                wanted.remove(largest)
                if not wanted:
                    adopt_statistics_(supernet)
                    return CalibrationReport(adopted=adopted)
        run = CalibrationRun(supernet, wanted, rule, memory_mb * 2**20)
        kept = Progress(resume, save_every_s, supernet, run)
        _pass(run, batches, inputs, kept, progress, supernet if check else None, require)
        rows = {spec: run.row(spec) for spec in wanted}
    require()
    for spec, row in rows.items():
        if not row.flat.isfinite().all():
            bad = [name for name, pair in row.pairs().items() if not all(t.isfinite().all() for t in pair)]
            raise SpecError(
                f"calibration of {spec} gave statistics that are not finite, first at {bad[0]}; check the "
                "batches and the weights for NaN"
            )
    kept.save()
    with supernet.generation.lock:
        require()
        if adopted and adopt is None and not supernet.generation.is_original:
            raise StaleWeights(
                "calibration: the BatchNorm statistics that the network came with were changed meanwhile, by "
                "training for example; nothing was written, calibrate again"
            )
        supernet.norms.update(rows)
        if adopted:
            adopt_statistics_(supernet)
    report = CalibrationReport(
        subnets=len(wanted),
        batches=run.finished,
        layers_computed=run.calls.layers - run.calls.shared,
        layers_alone=run.calls.layers,
        kept_mb=run.calls.peak / 2**20,
        seconds=kept.seconds,
        adopted=adopted,
    )
    _log.info("calibration: %s", report)
    return report


class Progress:
    """The averages of a run so far, in a journal that belongs to its weights and subnets, and restores it."""

    def __init__(
        self, path: StrPath | None, save_every_s: float, supernet: Supernet, run: CalibrationRun
    ) -> None:
        self._journal: Journal | None = None
        self._save_every_s, self._run = save_every_s, run
        self._began = self._saved = time.perf_counter()
        self._given, self._first, self._digest = 0, "", ""
        self._stored: dict[str, Any] = {"run": {}, "given": 0, "seconds": 0.0, "first": "", "digest": ""}
        if path is None:
            return
        keys = checksum({"subnets": sorted(spec.key for spec in run.specs)})[:16]
        norms = batch_norms(supernet.network).values()
        environment = {
            "weights": supernet.fingerprint(),
            "subnets": f"{len(run.specs)} of {supernet.space.id}, {keys}",
            "rule": ", ".join(sorted({run.rule or norm.rule for norm in norms})),
            "device": supernet.device.type,
            "versions": f"subnetact {__version__}, torch {torch.__version__}",
        }
        self._journal = Journal(path, environment)
        with self._journal.fields():
            for line in self._journal.of(PROGRESS):
                self._stored = {name: type(empty)(line[name]) for name, empty in self._stored.items()}
                run.restore(self._stored["run"])

    @property
    def seconds(self) -> float:
        """The time that the calibration has taken, with earlier parts."""
        return float(self._stored["seconds"]) + time.perf_counter() - self._began

    def take(self, x: Any) -> None:
        """Take the next batch into the checksum, and refuse other batches than those of the file."""
        self._given += 1
        if self._journal is None:
            return
        now = self._digest = hash_of([x], self._digest)
        self._first = self._first or now
        stored = {1: self._stored["first"], self._stored["given"]: self._stored["digest"]}.get(self._given)
        if stored and stored != now:
            raise self._journal.mismatch(f"its first {self._given} batches are others. Give the same data")

    def check_length(self) -> None:
        """Refuse data of no batch, or of fewer batches than the file."""
        if not self._given:
            raise SpecError("calibration needs at least one batch, got none; a generator is read only once")
        if self._journal is not None and self._given < self._stored["given"]:
            raise self._journal.mismatch(
                f"it has {self._stored['given']} batches, the data only {self._given}. Give the same data"
            )

    def save(self, due: bool = True) -> None:
        """Keep the state of the run between two subnets, if it is `due` or the last time is long ago."""
        due = due or time.perf_counter() - self._saved >= self._save_every_s
        if due and self._journal is not None:
            digests = {"first": self._first, "digest": self._digest}
            facts = {"seconds": self.seconds, "run": self._run.state()}
            self._journal.replace(PROGRESS, given=self._given, **digests, **facts)
            self._saved = time.perf_counter()


def _pass(
    run: CalibrationRun,
    batches: Iterable[Any],
    inputs: Callable[[Any], Any],
    kept: Progress,
    progress: bool,
    unchecked: Supernet | None,
    require: Callable[[], None],
) -> None:
    subnets = len(run.specs)
    total = len(batches) * subnets if isinstance(batches, Sized) else None
    title = f"calibrating {subnets} subnets"
    bar = tqdm(total=total, desc=title, unit=" subnet batches", disable=not progress or None, leave=None)
    with bar:
        for i, batch in enumerate(batches):
            x = inputs(batch)
            kept.take(x)
            if i < run.finished:
                bar.update(subnets)
                continue
            bar.set_postfix(batch=i + 1, refresh=False)
            try:
                for _ in run.batch(x):
                    bar.update()
                    require()
                    kept.save(due=False)
            except Exception:
                require()
                raise
            if unchecked is not None:
                check_once(unchecked, x)
                unchecked = None
    kept.check_length()


def _inputs(batch: Any, supernet: Supernet, labels: bool) -> Any:
    """Return the inputs of a batch on the supernet's device; SpecError if the network takes others."""
    x = as_pair(batch, "labels=True")[0] if labels else as_batch(batch)
    try:
        if isinstance(x, tuple) and not labels:
            signature(supernet.network.forward).bind(*x)
    except TypeError as error:
        raise SpecError(
            f"a batch is a tuple of {', '.join(map(describe_input, x))}, and the network does not take these "
            f"arguments ({error}); if batches are pairs (inputs, labels), give calibrate labels=True"
        ) from error
    parts = list(tensors_of(x))
    tensors = [part for part in parts if isinstance(part, Tensor)]
    foreign = any(not isinstance(part, Tensor | int | float | str | None) for part in parts)
    if not tensors or not all(part.numel() for part in tensors) or foreign:
        raise SpecError(
            "a calibration batch is a tensor, a dictionary of named tensors or a tuple of positional "
            f"tensors, got {describe_input(x)}"
        )
    return map_tensors(lambda t: t.to(supernet.device), x)
