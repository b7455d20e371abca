"""`ClosedOnExit`: what a `with` or an `async with` statement closes."""

from __future__ import annotations

import asyncio
from typing import TypeVar

Self = TypeVar("Self", bound="ClosedOnExit")


class ClosedOnExit:
    """Closes at the end of the statement: after what waits was served, or at once if there is an error."""

    def close(self, drain: bool = True) -> None:
        """Finish what waits if `drain`, and end."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    async def __aenter__(self: Self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await asyncio.to_thread(self.close, kind is None)
