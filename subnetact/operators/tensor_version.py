"""The version counter of a tensor, which tells whether the tensor has changed in place."""

from torch import Tensor

__all__ = ["tensor_version"]


def tensor_version(tensor: Tensor) -> int:
    """Return a number that grows whenever a tensor is changed in place.

    Tensors made in inference mode have no such counter; for them the number is always 0.
    """
    return 0 if tensor.is_inference() else tensor._version
