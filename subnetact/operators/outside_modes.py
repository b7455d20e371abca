"""outside_modes: what is made of the weights and stays must not depend on the modes of who asks first."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def outside_modes() -> Iterator[None]:
    """Leave the caller's inference mode, gradients, autocast and dispatch modes, `FakeTensorMode` too."""
    with torch._C._DisableAutocast(), torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        yield
