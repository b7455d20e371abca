"""CompiledPlan: torch.compile for every subnet, without its silent fallback to eager mode.

Each pair of subnet and input shape has a code object of its own (`compiled_call.py` says why); one that would
be compiled again is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subnetact.engine.config import FUSED, VIEWS
from subnetact.engine.fusion_plan import Plan
from subnetact.engine.inputs import laid_out
from subnetact.engine.ready_subnet import Bound, ReadySubnet
from subnetact.engine.runtime_program import RUNTIMES
from subnetact.errors import EngineError, InvalidRequest, RecompileRefused
from subnetact.files.fork import new_lock
from subnetact.operators.packed_copy import follow_, registries_of_copies
from subnetact.supernet.compiled_call import own_code


@dataclass(eq=False)
class CompiledPlan(Plan):
    """All subnets compiled, by subnet and input shape; once `sealed`, only `prepare` compiles."""

    compiles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.backend not in torch.compiler.list_backends(()):
            known = ", ".join(dict.fromkeys((FUSED, VIEWS, *RUNTIMES, *torch.compiler.list_backends())))
            raise EngineError(f"backend: there is no {self.backend!r} here; choose from {known}")
        self.never = f"the engine compiles its subnets instead (backend={self.backend!r})"
        self._compiling = new_lock(threading.RLock)

    def program(self, subnet: ReadySubnet, bound: Bound) -> Any:
        """Return the callable of a view; it refuses shapes that were not prepared if sealed."""
        known = self.compiled.get(subnet.id)
        if known is None or known[0] is not bound:
            with self._compiling:
                known = self.compiled.get(subnet.id)
                if known is None or known[0] is not bound:
                    known = self.compiled[subnet.id] = bound, self._callable(subnet.id, bound)
        return known[1]

    def prepare(self, subnet: ReadySubnet, x: Any) -> None:
        """Compile a subnet for the shape of a batch."""
        with torch.inference_mode():
            x = laid_out(x) if isinstance(x, Tensor) else x
            self.program(subnet, self._bind(subnet))(x, compiles=True)

    def drop(self, subnet: int) -> None:
        """Remove the callable of a subnet, and its pin."""
        super().drop(subnet)
        self.compiled.pop(subnet, None)

    def _callable(self, subnet: int, bound: Bound) -> Callable[..., Any]:
        shapes: dict[Any, Callable[[Tensor], Any]] = {}
        copied = registries_of_copies(bound.view)

        def run(x: Any, compiles: bool = False) -> Any:
            if not isinstance(x, Tensor):
                raise InvalidRequest(
                    f"input: a compiled engine serves single tensors, got {type(x).__name__}; leave out "
                    "backend="
                )
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
        backend = torch._dynamo.lookup_backend(self.backend)

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
