"""sandwich_step: adds the gradients of the largest, the smallest and some random subnets."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from subnetact.comparison import tensors_in
from subnetact.device import ran_out_of_memory
from subnetact.errors import InsertError, SpecError, SubnetActError
from subnetact.operators.shards import is_collective
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import as_batch, call_with, describe_input, logits, tensors_of
from subnetact.supernet.failure import summary
from subnetact.supernet.load import warn_caller
from subnetact.supernet.statistics import batch_norms
from subnetact.supernet.supernet import Supernet, supernet_of
from subnetact.training.processes import agreed

IGNORED = -100
"""The label of a pixel or token that does not count, as transformers and `cross_entropy` of torch have it."""

Loss = Callable[[Any, Any], Tensor]
Places: TypeAlias = tuple[Tensor, ...] | None
"""Where scores count, as indices along all axes but that of the classes; None if everywhere."""


def sandwich_step(
    model: Any,
    inputs: Any,
    labels: Any,
    *,
    rng: random.Random,
    loss: Loss = F.cross_entropy,
    random_subnets: int = 2,
    subnets: Sequence[SubnetSpec] | None = None,
    distillation: float = 1.0,
    class_dim: int | None = None,
    divergence: Loss | None = None,
    output: Callable[[Any], Any] = logits,
    teacher: Callable[..., Any] | None = None,
    backward: Callable[[Tensor], Any] | None = None,
    average: bool = True,
) -> dict[SubnetSpec, Tensor]:
    """Add the gradients of one batch for the largest, the smallest and some random subnets.

    The largest subnet learns from the labels, the others from the largest one's outputs (in-place
    distillation), from the labels, or from a mixture. Memory holds the activations of one subnet at a time.
    No parameter is changed: call `optimizer.zero_grad()` before and `optimizer.step()` after this. To
    accumulate gradients over several batches, call it several times in between, and divide the loss by their
    number. Call `calibrate` after the training.

    Args:
        model: the supernet in training mode, its `network`, or what others' tools put around either:
            `DistributedDataParallel`, `fully_shard`, accelerate's `prepare`, `torch.compile` or an adapter.
        inputs: what the network takes: a tensor, or a tuple or mapping of tensors.
        labels: what `loss` compares outputs with, of shape (N,) for example.
        rng: draws the random subnets. Processes may draw different ones, and as many each; where a forward
            needs all processes (sharded weights, SyncBatchNorm), all train those of the first process.
        loss: a function of the scores, which are what `output` returns, and the labels. The result is a
            scalar tensor.
        random_subnets: number of random subnets per step, all distinct; all there are if the space has fewer.
        subnets: the subnets to train instead, the teacher first. Use this to shrink progressively. Weights
            that none of them uses have gradients of zero, and weight decay and momentum move them: train the
            largest in every step, or take an optimizer without them. Without the largest, it warns once.
        distillation: share, from 0 to 1, of the distillation in the loss of all subnets but the first; the
            rest is `loss`. It is the cross-entropy with the teacher, without what `loss` ignores (-100).
        class_dim: the dimension of the classes in the scores, which distillation needs: 1 for images of
            scores (N, classes, H, W), -1 for language models (N, tokens, vocabulary). If None, it is 1 if
            the scores have two dimensions or `loss` is `cross_entropy` of torch, which reads it there.
        divergence: what distillation minimises instead, for outputs that are no class scores, for example; a
            function of the scores of a subnet and those of its teacher, which have no gradients. The result
            is a scalar tensor. `class_dim` is then not used.
        output: a function of what the network returns, for the scores. If not given, they are its `logits`,
            or the first of several outputs.
        teacher: a network that is called with the batch, without gradients, for the scores to learn from. The
            first subnet then has distillation in its loss, too. If None, the first subnet is the teacher.
        backward: called with each loss. If None, `loss.backward()`. With a gradient scaler, give
            `lambda loss: scaler.scale(loss).backward()`.
        average: whether a `DistributedDataParallel` averages the gradients over its processes at the end;
            give False for all but the last of several batches that are accumulated.

    Returns:
        The loss of every subnet that was trained, the largest (or the first of `subnets`) first: tensors of
        no dimensions without gradients, so that a step waits for no GPU; `float(loss)` does.

    Raises:
        SpecError: an argument is out of its range, the supernet is in evaluation mode, or distillation finds
            no class scores, or cannot know their dimension.
        InsertError: there is no supernet in `model`, or a branch of the network that only training runs reads
            channels that are narrow in a subnet.

    Source:
        US-Nets (ICCV'19), section 3; BigNAS (ECCV'20), section 3.1.

    Example:
        >>> for inputs, labels in loader:
        ...     optimizer.zero_grad()
        ...     losses = sandwich_step(supernet, inputs, labels, rng=rng)
        ...     optimizer.step()
    """
    given = dict(locals())
    plain = supernet_of(model)
    if subnets is None and is_collective(model):
        rng.setstate(agreed(rng.getstate()))
    specs = drawn(plain, subnets, random_subnets, rng)
    if plain not in _without_largest and plain.space.largest().base not in {spec.base for spec in specs}:
        _without_largest.add(plain)
        warn_caller(
            "subnets= leave the largest out: weights that only larger subnets use have gradients of zero, "
            "but weight decay and the momentum of an optimizer move them. Train the largest in every step, "
            "or give the optimizer weight_decay=0 and make it anew for such steps",
            RuntimeWarning,
        )
    share: Any = distillation
    if not isinstance(share, int | float) or not 0.0 <= share <= 1.0:
        raise SpecError(f"distillation: {share!r} is no number from 0.0 to 1.0")
    for name in ("loss", "divergence", "output", "teacher", "backward"):
        if not callable(given[name]) and (given[name] is not None or name in ("loss", "output")):
            raise SpecError(f"{name}: {given[name]!r} is no function")
    if not torch.is_grad_enabled():
        raise SpecError("a training step needs gradients; leave torch.no_grad() or inference mode first")
    if not plain.training:
        raise SpecError("the supernet is in evaluation mode; call supernet.train() before a training step")
    x = as_batch(inputs)
    if not any(isinstance(part, Tensor) for part in tensors_of(x)):
        raise SpecError(f"inputs: expected a tensor, or a tuple or mapping of them, got {describe_input(x)}")
    place = 1 if class_dim is None and loss is F.cross_entropy else class_dim
    ignored = getattr(loss, "ignore_index", IGNORED if loss is F.cross_entropy else None)
    target: Callable[[Any], Any] = partial(_wanted, class_dim=place, labels=labels, ignored=ignored)
    apart: Loss = partial(_distillation, class_dim=place)
    if divergence is not None:
        target, apart = (lambda scores: scores), divergence
    wanted: Any = None
    if teacher is not None and distillation:
        with torch.no_grad():
            wanted = target(output(call_with(teacher, x)))
    losses: dict[SubnetSpec, Tensor] = {}
    parallel = isinstance(model, DistributedDataParallel)
    if parallel:
        _warn_of_batches_apart(plain)
    with model.no_sync() if parallel else nullcontext():  # One average of the sum of all gradients is enough.
        for spec in specs:
            with plain.running(spec):
                scores = output(_run(model, x, plain.network, largest=not losses))
                if wanted is None or not distillation:
                    total = loss(scores, labels)
                    if distillation and len(specs) > 1:
                        with torch.no_grad():
                            wanted = tree_map_only(Tensor, Tensor.detach, target(scores))
                        if any(tensor.requires_grad for tensor in tensors_in(wanted)):
                            raise SpecError(
                                f"output: {type(wanted).__name__} keeps the gradients of the teacher; let "
                                "output return tensors, in tuples or dictionaries"
                            )
                else:
                    total = distillation * apart(scores, wanted)
                    if distillation < 1.0:
                        total = total + (1.0 - distillation) * loss(scores, labels)
                _check_loss(total)
                (backward or torch.autograd.backward)(total)
                losses[spec] = total.detach()
    if average and parallel:
        average_gradients(plain, model.process_group)
    return losses


def _warn_of_batches_apart(supernet: Supernet) -> None:
    """Say once that BatchNorms of several processes normalise apart."""
    apart = [n for n in batch_norms(supernet.network).values() if not isinstance(n, nn.SyncBatchNorm)]
    if apart and distributed.get_world_size() > 1 and supernet not in _warned:
        _warned.add(supernet)
        warn_caller(
            f"{len(apart)} BatchNorms normalise with the batch of their own process, and running statistics "
            "are those of one process; calibrate after the training, or convert the network with "
            "SyncBatchNorm.convert_sync_batchnorm before insert_",
            UserWarning,
        )


_warned: weakref.WeakSet[Supernet] = weakref.WeakSet()
_without_largest: weakref.WeakSet[Supernet] = weakref.WeakSet()


def drawn(
    supernet: Supernet, subnets: Sequence[SubnetSpec] | None, count: int, rng: random.Random
) -> list[SubnetSpec]:
    """Return the subnets of a step: those given, or the largest, the smallest and random ones."""
    space = supernet.space
    if subnets is not None:
        return supernet.space.distinct(subnets, "a training step")
    if type(count) is not int or count < 0:
        raise SpecError(f"random_subnets: {count!r} is no whole number of at least 0")
    smallest, *others = space.sample(rng, 2 + count)
    return [*others[:1], smallest, *others[1:]]


def _run(model: nn.Module, x: Any, network: nn.Module, largest: bool) -> Any:
    try:
        return call_with(model, x)
    except RuntimeError as error:
        if largest or isinstance(error, SubnetActError) or ran_out_of_memory(error):
            raise
        raise InsertError(
            "a subnet does not run in training mode, although the first one does: "
            f"{summary(network, error)}; what only training runs, as an auxiliary classifier, was not seen "
            "by insert_: remove it from the model before insert_, or keep what it reads at its full size "
            "(fixed=...)"
        ) from error


def average_gradients(supernet: Supernet, group: Any = None) -> None:
    """Replace every gradient by its mean over all processes, in which different subnets may have run."""
    wanted = [parameter for parameter in supernet.parameters() if parameter.requires_grad]
    present = torch.tensor([p.grad is not None for p in wanted], dtype=torch.int32, device=wanted[0].device)
    distributed.all_reduce(present, group=group)
    used = [parameter for parameter, count in zip(wanted, present.tolist(), strict=True) if count]
    for dtype in dict.fromkeys(parameter.dtype for parameter in used):
        grads = []
        for parameter in (p for p in used if p.dtype == dtype):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grads.append(parameter.grad)
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        distributed.all_reduce(flat, group=group)
        flat /= distributed.get_world_size(group)
        for grad, mean in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))


def _check_loss(total: Any) -> None:
    if not isinstance(total, Tensor) or total.dim():
        got = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise SpecError(f"loss: the result must be a scalar, got {got}; average over the batch")
    if not total.requires_grad:
        raise SpecError(
            "loss: the result has no gradient; compute it from scores, and let parameters require gradients"
        )


def _scores(scores: Any, class_dim: int | None) -> Tensor:
    """Return class scores with the classes in dimension 1."""
    if not isinstance(scores, Tensor) or scores.dim() < 2:
        raise SpecError(
            f"distillation needs class scores of shape (N, classes, ...), got {describe_input(scores)}; give "
            "distillation=0.0 for other outputs"
        )
    shape = tuple(scores.shape)
    if class_dim is None and scores.dim() > 2:
        raise SpecError(
            f"class_dim: scores of shape {shape} do not say which dimension holds the classes; "
            "give class_dim=-1 for language models, 1 for (N, classes, ...), or distillation=0.0"
        )
    place = 1 if class_dim is None else class_dim
    if type(place) is not int or not -scores.dim() < place < scores.dim() or not place:
        raise SpecError(f"class_dim: {class_dim!r} is no dimension of scores of shape {shape} but 0")
    return scores.movedim(place, 1)


def counted(scores: Any, labels: Any, ignored: int | None) -> Places:
    """Return where labels (N, ...) of scores (N, classes, ...) are classes; None if all are, or others."""
    tensors = isinstance(scores, Tensor) and isinstance(labels, Tensor)
    if ignored is None or not tensors or labels.is_floating_point() or labels.shape != scores[:, 0].shape:
        return None
    return places_of((labels != ignored) & (labels >= 0) & (labels < scores.shape[1]))


def places_of(counts: Tensor) -> Places:
    """Return where a mask is True, which waits for its device, so that who asks there does not."""
    return None if bool(counts.all()) else counts.nonzero(as_tuple=True)


def cross_entropy(student: Tensor, teacher: Tensor, places: Places = None) -> Tensor:
    """Return the mean cross-entropy with the teacher's probabilities, of the scores that are `counted`."""
    if places is not None:
        student, teacher = (scores.movedim(1, -1)[places] for scores in (student, teacher))
    return F.cross_entropy(student.float(), teacher.float().softmax(1)) if len(student) else student.sum()


def _wanted(scores: Any, class_dim: int | None, labels: Any, ignored: int | None) -> tuple[Tensor, Places]:
    """Return the scores of a teacher, and where they count."""
    scores = _scores(scores, class_dim).clone()  # a compiled teacher may write its next ones over them
    return scores, counted(scores, labels, ignored)


def _distillation(output: Any, wanted: tuple[Tensor, Places], class_dim: int | None) -> Tensor:
    scores, (teacher, places) = _scores(output, class_dim), wanted
    if scores.shape != teacher.shape:
        raise SpecError(
            f"distillation: the student's scores {tuple(scores.shape)} do not fit the teacher's "
            f"{tuple(teacher.shape)}; the classes are in dimension 1 of both"
        )
    return cross_entropy(scores, teacher, places)
