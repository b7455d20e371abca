"""ModuleSwitch: one of several modules, one for each listed subnet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from subnetact.operators.layer_select import LayerSelect
from subnetact.space import Row

__all__ = ["ModuleSwitch", "SwitchableModule"]


class SwitchableModule(nn.Module):
    """Modules of which one is used; as it is, the one at `default`.

    Args:
        modules: the alternatives, named by their positions.
        default: the position of the full network's.
    """

    def __init__(self, *modules: nn.Module, default: int) -> None:
        super().__init__()
        for i, module in enumerate(modules):
            self.add_module(str(i), module)
        self.default = str(default)

    def forward(self, x: Tensor) -> Tensor:
        """Run the default alternative."""
        return self._modules[self.default](x)  # type: ignore[misc, no-any-return]


class ModuleSwitch(LayerSelect):
    """Puts one of an `SwitchableModule`' modules in its place (Slimmable Networks' switchable BatchNorm).

    `ModuleSwitch.on(choice="width.position")` follows a dimension that is one more than the position. The
    alternatives share nothing, affine parameters included.
    """

    parts = ("choice",)

    def check(self) -> None:
        """Refuse other modules."""
        if not isinstance(self.template, SwitchableModule) or "choice" not in self.dims:
            raise self.refuse("only SwitchableModule, with a dimension for 'choice', can be switched")

    def full(self, part: str) -> int:  # noqa: ARG002
        """Return the number of alternatives."""
        return len(self._modules)

    def legal(self, part: str) -> Sequence[int]:
        """Return 1 .. the number of alternatives."""
        return range(1, self.full(part) + 1)

    def gate(self, name: str) -> tuple[int, int]:
        """Return the position in a row, and the value there that chooses an alternative."""
        return self.dims["choice"], int(name) + 1

    def kept(self, row: Row) -> list[str]:
        """Return the name of the subnet's alternative.

        Raises:
            SpecError: the dimension is outside 1 .. the number of alternatives.
        """
        self.size("choice", row)
        return super().kept(row)

    def chain(self, layers: dict[str, nn.Module | None]) -> nn.Module:
        """Return all alternatives in a row, of which those not chosen hand on their input."""
        return nn.Sequential(
            OrderedDict((name, layer) for name, layer in layers.items() if layer is not None)
        )

    def select(self, layers: dict[str, nn.Module | None]) -> nn.Module:
        """Return the already bound alternative itself."""
        (chosen,) = layers.values()
        if chosen is None:
            raise self.refuse("an alternative is missing")
        return chosen
