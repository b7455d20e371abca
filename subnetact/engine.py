"""Engine: the registered subnets of a supernet, ready to run on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.errors import InvalidRequest, NotCalibrated, SpecError
from subnetact.spec import SubnetSpec
from subnetact.supernet import Supernet
from subnetact.timing import find_device

__all__ = ["Engine"]


class Engine:
    """Subnets 0 .. n-1 of one supernet, each ready as a zero-copy view.

    It is the runner of a `Batcher` and what `profile_latency` measures. Safe to use from many threads.

    Args:
        supernet: the supernet; it is moved to `device`.
        specs: the subnets to register; their ids are their positions.
        example: one input without a batch dimension, (C, H, W) for images: the shape and dtype that
            requests must have.
        device: where to run; None = where the supernet is.
        allow_uncalibrated: whether subnets without BatchNorm statistics of their own are accepted.

    Attributes:
        specs: the registered subnets, in id order.
        keys: their readable keys.
        fingerprint: the hash of the weights they were registered with.

    Raises:
        NotCalibrated: a subnet has no statistics of its own.
        SpecError: a specification is of another space, repeated, or there is none.
        DeviceError: the device cannot be used here.
    """

    def __init__(
        self,
        supernet: Supernet,
        specs: Sequence[SubnetSpec],
        *,
        example: Tensor,
        device: str | torch.device | None = None,
        allow_uncalibrated: bool = False,
    ) -> None:
        self.specs = tuple(supernet.space.check(spec) for spec in specs)
        if not self.specs or len(set(self.specs)) != len(self.specs):
            raise SpecError(f"an engine needs distinct subnets, at least one; got {len(self.specs)}")
        bare = [spec for spec in self.specs if not supernet.calibrated(spec)]
        if bare and not allow_uncalibrated:
            raise NotCalibrated(
                f"{len(bare)} of {len(self.specs)} subnets have no BatchNorm statistics of their own, "
                f"{bare[0]} first; call subnetact.calibrate(supernet, specs, batches), or pass "
                "allow_uncalibrated=True to serve them on the shared ones"
            )
        home = next(supernet.parameters()).device
        self.device = home if device is None else find_device(device)
        if self.device != home:
            supernet.to(self.device)
        self.supernet = supernet.eval()
        self.example = example.detach().to("cpu")
        self.keys = tuple(spec.key for spec in self.specs)
        self.fingerprint = supernet.fingerprint()
        self._views = tuple(supernet.subnet(spec) for spec in self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def ready(self, subnet: int) -> Callable[..., Any]:
        """Return the callable of a registered subnet.

        Raises:
            SpecError: there is no such id.
        """
        return self._view(subnet)

    def __call__(self, x: Any, subnet: int) -> Any:
        """Run a batch, x of shape (N, ...) on the engine's device, through a registered subnet."""
        with torch.inference_mode():
            return self._view(subnet)(x)

    def check(self, x: Any) -> None:
        """Refuse an input that could not run: anything but the example's shape and dtype.

        Raises:
            InvalidRequest: naming what is wrong.
        """
        if not isinstance(x, Tensor):
            raise InvalidRequest(f"input: expected a torch.Tensor, got {type(x).__name__}")
        if x.shape != self.example.shape or x.dtype != self.example.dtype:
            raise InvalidRequest(
                f"input: got {x.dtype} of shape {tuple(x.shape)}, this engine serves {self.example.dtype} "
                f"of shape {tuple(self.example.shape)}, without a batch dimension"
            )

    def run(self, subnet: int, inputs: Sequence[Tensor], batch_size: int) -> Sequence[Tensor]:  # noqa: ARG002
        """Run single inputs as one batch and return one output each, on the CPU.

        `batch_size` is what the inputs may be padded to; eager execution needs no padding.
        """
        return self(torch.stack(list(inputs)).to(self.device), subnet).cpu().unbind(0)  # type: ignore[no-any-return]

    def _view(self, subnet: int) -> nn.Module:
        if not 0 <= subnet < len(self._views):
            raise SpecError(f"no subnet {subnet}; this engine has 0..{len(self._views) - 1}")
        return self._views[subnet]
