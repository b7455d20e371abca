"""torch.compile for every subnet, without its silent fallback to eager mode.

Each pair of subnet and input shape has a code object of its own (`compiled_call.py` says why); one that would
be compiled again is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.engine.config import FUSED, VIEWS
from subnetact.engine.ready_subnet import Bound
from subnetact.engine.runtime_program import RUNTIMES
from subnetact.errors import EngineError, RecompileRefused
from subnetact.files.fork import new_lock
from subnetact.operators.packed_copy import follow_, registries_of_copies
from subnetact.supernet.compiled_call import own_code


class Compiler:
    """Compiled callables by subnet and input shape; once `sealed`, only `compiles=True` compiles."""

    def __init__(self, backend: str) -> None:
        if backend not in torch.compiler.list_backends(()):
            known = ", ".join(dict.fromkeys((FUSED, VIEWS, *RUNTIMES, *torch.compiler.list_backends())))
            raise EngineError(f"backend: there is no {backend!r} here; choose from {known}")
        self.sealed = False
        self._backend = backend
        self._compiled: dict[int, tuple[Bound, Callable[..., Any]]] = {}
        self._compiling = new_lock(threading.RLock)

    def __len__(self) -> int:
        """Return the number of subnets that have a callable."""
        return len(self._compiled)

    def of(self, subnet: int, bound: Bound) -> Callable[..., Any]:
        """Return the callable of a view; it compiles at the first call with a shape, or refuses if sealed."""
        known = self._compiled.get(subnet)
        if known is None or known[0] is not bound:
            with self._compiling:
                known = self._compiled.get(subnet)
                if known is None or known[0] is not bound:
                    known = self._compiled[subnet] = bound, self._callable(subnet, bound)
        return known[1]

    def drop(self, subnet: int) -> None:
        """Remove the callable of a subnet."""
        self._compiled.pop(subnet, None)

    def _callable(self, subnet: int, bound: Bound) -> Callable[..., Any]:
        shapes: dict[Any, Callable[[Tensor], Any]] = {}
        copied = registries_of_copies(bound.view)

        def run(x: Tensor, compiles: bool = False) -> Any:
            for own in copied:
                follow_(own)
            compiled = shapes.get((x.shape, x.dtype))
            try:
                if compiled is not None:
                    return compiled(x)
                with self._compiling:  # The first call compiles.
                    compiled = shapes.get((x.shape, x.dtype))
                    if compiled is None and self.sealed and not compiles:
                        raise RecompileRefused(
                            f"subnet {subnet}: input of shape {tuple(x.shape)} was not prepared, or weights "
                            "or statistics were replaced; call "
                            f"engine.prepare(batch_sizes=[{x.shape[0]}, ...]) again, or pad the batch"
                        )
                    compiled = compiled or self._compile(subnet, bound.view, x, shapes)
                    output = compiled(x)
                    shapes[x.shape, x.dtype] = compiled
                    return output
            except torch._dynamo.exc.BackendCompilerFailed as error:
                if isinstance(error.inner_exception, RecompileRefused):
                    raise error.inner_exception from None
                raise

        return run

    def _compile(self, subnet: int, view: nn.Module, x: Tensor, known: Container[Any]) -> Any:
        backend = torch._dynamo.lookup_backend(self._backend)

        def once(graph: Any, inputs: Any) -> Any:
            if (x.shape, x.dtype) in known:
                raise RecompileRefused(
                    f"subnet {subnet}: torch.compile would compile a prepared shape again, "
                    f"{tuple(x.shape)}; run it as it was prepared"
                )
            return backend(graph, inputs)

        def call(x: Tensor) -> Any:
            return view(x)

        own = own_code(call, f"subnet_{subnet}_{'x'.join(map(str, x.shape))}")
        return torch.compile(own, backend=once, fullgraph=True, dynamic=False)
