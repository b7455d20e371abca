"""compiled_call: runs a subnet under torch.compile, in a function of its own.

torch.compile keeps a few versions per code object (`torch._dynamo.config.recompile_limit`), and then runs
eagerly, which its log tells once. Subnets that run in the same code would take each other's places.
"""

from __future__ import annotations

import itertools
import weakref
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from subnetact.operators import SubnetNorm
from subnetact.operators.packed_copy import follow_, registries_of_copies
from subnetact.space import SizeRow
from subnetact.spec import SubnetSpec
from subnetact.supernet.bind import bind, private_buffers

MOST_SUBNETS = 1024
"""So many subnets, those that ran last, keep what was compiled for them."""
_numbers = itertools.count()


def own_code(function: Any, name: str) -> Any:
    """Return a function with a code object of its own, for which torch.compile counts versions apart."""
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def _run(network: nn.Module, args: Any, kwargs: Any) -> Any:
    return network(*args, **kwargs)


@lru_cache(MOST_SUBNETS)
def _run_of(supernet: weakref.ref[nn.Module], row: SizeRow, training: bool) -> Any:  # noqa: ARG001
    return own_code(_run, f"subnet_{next(_numbers)}")


@_disable_dynamo(recursive=False)  # torch.compiler.disable would import the compiler with this module.
def compiled_call(supernet: Any, spec: SubnetSpec | None, args: Any, kwargs: Any) -> Any:
    """Run a subnet in code of its own, which is compiled; this function, which binds it, is not."""
    network, run = _bound(supernet, spec)
    return run(network, args, kwargs)


@_disable_dynamo
def _bound(supernet: Any, spec: SubnetSpec | None) -> tuple[nn.Module, Any]:
    spec = supernet._actuation.now().spec if spec is None else spec
    torch._dynamo.eval_frame.skip_code(type(supernet).forward.__code__)  # It would reach the limit for all.
    network = _trainable(supernet, spec) if supernet.training else supernet.subnet(spec)
    for registry in registries_of_copies(network):
        follow_(registry)
    return network, _run_of(weakref.ref(supernet), supernet.space.resolve(spec), supernet.training)


def _trainable(supernet: Any, spec: SubnetSpec) -> nn.Module:
    """Return the network of a subnet, put together before it runs, for torch.compile."""
    run = supernet._actuation.run_of(supernet.space, spec)
    copies = None if run.is_largest else private_buffers()
    norm = partial(SubnetNorm.module_of, run=run)
    return bind(supernet.network, run.row, norm, trainable=True, frozen=copies)
