"""fold_: weights that a norm or another parametrisation computes become ordinary parameters."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from subnetact.errors import InsertError


def computed_tensors(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the names of tensors of a module that it computes from others, and what computes each."""
    if parametrize.is_parametrized(module):
        yield from module.parametrizations.items()  # type: ignore[union-attr, operator]
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm):
            yield hook.name, hook
        elif isinstance(hook, prune.BasePruningMethod):
            yield hook._tensor_name, hook


def fold_(model: nn.Module) -> tuple[str, ...]:
    """Make weight norms, spectral norms, pruning and parametrisations permanent in a model, in place.

    `insert_` slices weights, and refuses those that are computed from other parameters in every call. After
    this call, they are ordinary parameters with their usual names, and the model computes what it computed
    before, up to rounding. Training goes on without the norm, so make optimisers after this call.

    Args:
        model: an ordinary model, in evaluation mode.

    Returns:
        The names of the tensors that are parameters now, `decoder.0.weight` for example.

    Raises:
        InsertError: the model is in training mode, where every call changes a spectral norm. It is then
            unchanged.

    Example:
        >>> subnetact.insertion.fold_(vocoder.eval())
        >>> supernet = subnetact.insert_(vocoder, example=spectrogram)
    """
    if not isinstance(model, nn.Module):
        raise InsertError(f"fold_: expected a model, got {type(model).__name__}; give an nn.Module")
    found = [(path, module, list(computed_tensors(module))) for path, module in model.named_modules()]
    for path, module, own in found:
        if own and module.training:
            raise InsertError(
                f"fold_: {type(model).__name__}.{path} is in training mode, where every call may change its "
                "weights; call model.eval() first"
            )
    for _, module, own in found:
        for name, how in own:
            if isinstance(how, WeightNorm):
                remove_weight_norm(module, name)
            elif isinstance(how, SpectralNorm):
                remove_spectral_norm(module, name)
            elif isinstance(how, prune.BasePruningMethod):
                prune.remove(module, name)  # type: ignore[no-untyped-call]
            else:
                original = getattr(how, "original", None)
                if original is not None:  # It is written to, and another module may have it, too.
                    how.original = deepcopy(original)  # type: ignore[attr-defined]
                parametrize.remove_parametrizations(module, name)
    return tuple(f"{path}.{name}".lstrip(".") for path, _, own in found for name, _ in own)
