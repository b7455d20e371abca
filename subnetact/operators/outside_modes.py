"""outside_modes: what is made of the weights and stays must not depend on the modes of who asks first."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["outside_modes"]

_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


@contextmanager
def outside_modes() -> Iterator[None]:
    """Leave the caller's inference mode, gradients, autocast and dispatch modes, `FakeTensorMode` too."""
    with ExitStack() as modes:
        for device in filter(torch.is_autocast_enabled, _AUTOCAST_DEVICES):
            modes.enter_context(torch.autocast(device, enabled=False))
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        modes.enter_context(_disable_current_modes())
        yield
