"""Storage: the memory behind the tensors of a network, exchanged as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, UntypedStorage, nn

from subnetact.operators.tensor_version import storage_id


def renew_storage_(network: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Move the tensors of a network to copies of their storage, as `exchange_storage_` does."""
    tensors = [t for t in (*network.parameters(), *network.buffers()) if is_movable(t)]
    storages = {storage_id(t): t.untyped_storage() for t in tensors}
    copies = {number: storage.clone() for number, storage in storages.items()}  # type: ignore[no-untyped-call]
    return exchange_storage_(tensors, copies)


def exchange_storage_(
    tensors: Iterable[Tensor], storages: Mapping[int, UntypedStorage]
) -> list[tuple[Tensor, Tensor]]:
    """Move tensors, by the `storage_id` of their storage; return each with one on its former storage."""
    with torch.inference_mode(False), torch.no_grad():
        moved = []
        for tensor in {id(t): t for t in tensors if is_movable(t) and storage_id(t) in storages}.values():
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            place = tensor.storage_offset(), tensor.size(), tensor.stride()
            moved.append((tensor, tensor.data, empty.set_(storages[storage_id(tensor)], *place)))
        for tensor, _, new in moved:
            tensor.data = new
    return [(tensor, former) for tensor, former, _ in moved]


def is_movable(tensor: Tensor) -> bool:
    """Tell whether a tensor can be given other storage."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    shared = tensor.device.type == "cpu" and tensor.untyped_storage().is_shared()
    return not (shared or tensor.is_quantized or tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
