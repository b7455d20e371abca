"""What every Python program that tests start imports first; it saves a third of a short program's time."""

from __future__ import annotations

import atexit
import gc
import sys
from contextlib import suppress
from pathlib import Path

gc.set_threshold(10_000, 10, 10)
atexit.register(gc.freeze)  # an interpreter that ends looks through all that torch has made otherwise
sys.path.append(str(Path(__file__).parents[1]))


class _Torchvision:
    """Let libraries import a torchvision that was built for another torch."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            with suppress(ImportError):  # of torch
                from torchvision_operators import define_missing

                define_missing()


sys.meta_path.insert(0, _Torchvision())
