"""Functions of later rooms that methods of earlier ones are doors to, as `Supernet.save_pretrained` is.

A room imports from earlier ones only. The package knows all rooms, and says how such a function is found.
"""

from collections.abc import Callable
from typing import Any

find: Callable[[str], Callable[..., Any]]
"""Returns the function of a name; `subnetact/__init__.py` sets it."""
