"""ModuleSwitch: a place of the network where every subnet uses one of several modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from subnetact.operators.layer_select import LayerSelect
from subnetact.space import SizeRow

__all__ = ["ModuleSwitch", "SwitchableModule"]


class SwitchableModule(nn.Module):
    """Several modules of which one is used. Without an operator around it, that is the default one.

    Args:
        modules: the alternatives; their positions are their names.
        default: the position of the alternative of the full network.
    """

    def __init__(self, *modules: nn.Module, default: int) -> None:
        super().__init__()
        for i, module in enumerate(modules):
            self.add_module(str(i), module)
        self.default = str(default)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the default alternative.

        Args:
            x: an input that the default alternative takes.
        """
        return self._modules[self.default](x)  # type: ignore[misc, no-any-return]


class ModuleSwitch(LayerSelect):
    """Uses one of the alternatives of a `SwitchableModule` in each subnet; they share nothing.

    Parts:
        choice: which alternative: 1 for the first one, 2 for the second, and so on. It must be described.

    Source:
        The switchable BatchNorm of Slimmable Neural Networks (Yu et al., 2019).
    """

    parts = ("choice",)

    def check(self) -> None:
        """Refuse templates that are no SwitchableModule, and descriptions without `choice`."""
        if not isinstance(self.template, SwitchableModule) or "choice" not in self.dims:
            raise self.refuse("only SwitchableModule, with a dimension for 'choice', can be switched")

    def full(self, part: str) -> int:  # noqa: ARG002
        """Return the number of alternatives."""
        return len(self._modules)

    def legal(self, part: str) -> Sequence[int]:
        """Return the numbers from 1 to the number of alternatives."""
        return range(1, self.full(part) + 1)

    def gate(self, name: str) -> tuple[int, int]:
        """Return the position in size rows, and the size there with which an alternative is chosen."""
        return self.dims["choice"], int(name) + 1

    def kept(self, row: SizeRow) -> list[str]:
        """Return the name of the alternative that the subnet of a size `row` uses, as a list of one."""
        self.size("choice", row)
        return super().kept(row)

    def chain(self, layers: dict[str, nn.Module | None]) -> nn.Module:
        """Return all alternatives one after another; those that are not chosen are the identity."""
        return nn.Sequential(
            OrderedDict((name, layer) for name, layer in layers.items() if layer is not None)
        )

    def select(self, layers: dict[str, nn.Module | None]) -> nn.Module:
        """Return the chosen alternative, which is bound already."""
        (chosen,) = layers.values()
        if chosen is None:
            raise self.refuse("an alternative is missing")
        return chosen
