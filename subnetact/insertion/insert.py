"""insert_: makes an ordinary model elastic in place, from a description that was found, read or written."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from subnetact.errors import InsertError
from subnetact.insertion.description import Description
from subnetact.operators import Elastic
from subnetact.space import SubnetSpace
from subnetact.supernet.insert import insert_ as put_operators_
from subnetact.supernet.supernet import Supernet

__all__ = ["insert_"]


def insert_(
    model: nn.Module,
    description: Description | SubnetSpace | None = None,
    elastic: Mapping[str, Elastic] | None = None,
) -> Supernet:
    """Make a model elastic in place and return the supernet around it.

    There are two ways to call this function: `insert_(model, description)` with a `Description`,
    and `insert_(model, space, elastic)` with a space and an elastic description written by hand.

    A hand-written elastic description names every module that consumes a narrowed output as well: the
    BatchNorm after a narrowed convolution (`channels=`) and the next convolution or linear layer (`in_=`).
    Every BatchNorm with running statistics becomes a SubnetNorm, even if it is not described, because a
    subnet changes the values that flow through all of them.

    Args:
        model: an ordinary model. Its modules are replaced; its parameters keep their names.
        description: a description, or a search space.
        elastic: name of a module -> operator, with the dimension of the space that each of its parts
            follows. It is given with a space only.

    Returns:
        The supernet. Its `report` says what became elastic and which modules with weights stayed fixed.

    Raises:
        InsertError: a module or a dimension does not exist, a module cannot be made elastic, or a size of
            the largest subnet exceeds it. The model is then unchanged.

    Example:
        >>> elastic = {
        ...     "conv1": WeightSlice.on(out="width"),
        ...     "bn1": SubnetNorm.on(channels="width"),
        ...     "conv2": WeightSlice.on(in_="width"),
        ... }
        >>> supernet = insert_(model, space, elastic)
        >>> print(supernet.report)
    """
    if isinstance(description, SubnetSpace) and elastic is not None:
        return put_operators_(model, description, elastic)
    if not isinstance(description, Description) or elastic is not None:
        raise InsertError(
            "insert_ takes a model and a description (insert_(model, description)), or a model, a "
            "space and an elastic description (insert_(model, space, elastic))"
        )
    return put_operators_(model, description.space, description.elastic)
