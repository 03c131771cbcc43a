"""How much a rank gives to collectives."""

import dataclasses

import torch


@dataclasses.dataclass
class Traffic:
    """How much a rank has given to collectives so far.

    Attributes:
        collectives: number of Allreduces of model vectors, and of what takes their place.
        nbytes: their payload in bytes, per rank; where slices are exchanged, half of what goes there and back.
        largest: payload in bytes of the largest one.
        other_bytes: payload of everything else: losses, metrics, agreements.
    """

    collectives: int = 0
    nbytes: int = 0
    largest: int = 0
    other_bytes: int = 0

    def add(self, nbytes: int) -> None:
        """Count one Allreduce of `nbytes`."""
        self.collectives += 1
        self.nbytes += nbytes
        self.largest = max(self.largest, nbytes)

    def add_slices(self, vectors: list[torch.Tensor], out: torch.Tensor) -> None:
        """Count one exchange of slices: as one Allreduce of the same vector if the rank sends one."""
        self.add((sum(vector.nbytes for vector in vectors) + out.nbytes) // 2)

    def restore(self, numbers: dict[str, int]) -> None:
        """Take other numbers: name -> number, as `dataclasses.asdict` gives them; {}: nothing so far."""
        vars(self).update(dataclasses.asdict(Traffic()) | numbers)
