"""How much memory a rank's rows take."""

import torch

from fedmpi.federation.rows import RowStore


def num_bytes(store: RowStore) -> int:
    """Bytes of all rows and sums of a `RowStore`; also if they are on the device "meta", without memory."""
    parts = [store, store.tail, store.aggregation, store.beside, store.aggregation.beside]
    values = [value for part in parts if part is not None for value in vars(part).values()]
    values.append(store.tail.sent.agreed)
    held = [part for value in values for part in (value if isinstance(value, list) else [value])]
    return sum({id(tensor): tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor)}.values())
