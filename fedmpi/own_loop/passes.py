"""Where a user's own loop is in its passes over data: a resumed loop goes on with the next batch of the same pass."""

import dataclasses
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from fedmpi.federation.nested import flatten, unflatten
from fedmpi.ground.errors import UserError
from fedmpi.own_loop.objects import Objects

Batch = TypeVar("Batch")
STATES, FOREIGN = "passes", "foreign pass"


@dataclasses.dataclass
class Pass:
    """One loop over `fed.batches`.

    Attributes:
        total: batches that all ranks take. left: of these. taken: of the loader's current pass.
        generators: their states at the beginning of that pass, see `Objects.generators`.
    """

    total: int
    left: int
    taken: int = 0
    generators: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Passes:
    """The passes of one rank's loop, those from a checkpoint first. Not collective.

    `objects`: the `Objects` of a recorded loop; None: nothing is kept.
    """

    def __init__(self, objects: Objects | None = None) -> None:
        self._objects = objects
        self._active: list[Pass] = []
        self._resumed: list[Pass] = []
        self.foreign: list[int] = []  # [batches taken, length] of a DataLoader that the loop reads by itself

    def state(self) -> dict[str, Any]:
        """Name -> tensor or number."""
        active = [dataclasses.asdict(turn) for turn in self._active if turn.left]
        return {**flatten(active, STATES), **flatten(self.foreign, FOREIGN)}

    def restore(self, flat: Mapping[str, Any]) -> None:
        """Take what `state` gave."""
        self._resumed = [Pass(**turn) for turn in unflatten(flat, STATES)]
        self.foreign = unflatten(flat, FOREIGN)

    def batches(self, loader: Iterable[Batch], length: int, total: int) -> Iterator[Batch]:
        """`total` batches of a loader with `length` in a pass.

        Raises:
            UserError: if it has fewer, or if a pass that goes on had another number.
        """
        resumed = bool(self._resumed)
        current = self._resumed.pop(0) if resumed else Pass(total, total)
        if current.total != total:
            raise UserError(f"batches: the checkpoint is one in a loop over {current.total} batches, now {total}")
        self._active.append(current)
        try:
            while current.left > 0:
                yield from self._one_pass(loader, current, length, resumed)
                resumed = False
        finally:
            self._active.remove(current)

    def _one_pass(self, loader: Iterable[Batch], current: Pass, length: int, resumed: bool) -> Iterator[Batch]:
        iterator = self._resume(loader, current) if resumed else self._begin(loader, current)
        for batch in iterator:
            current.left, current.taken = current.left - 1, current.taken + 1
            yield batch
            if current.left == 0:
                return
        if current.taken < length:
            raise UserError(f"batches: the loader gave {current.taken} batches in a pass: its length is {length}")

    def _begin(self, loader: Iterable[Batch], current: Pass) -> Iterator[Batch]:
        if self._objects:
            current.generators = self._objects.generators()
        current.taken = 0
        return iter(loader)

    def _resume(self, loader: Iterable[Batch], current: Pass) -> Iterator[Batch]:
        """The rest of a pass: with the generators as they were at its beginning, it is drawn again, up to its place."""
        assert self._objects is not None
        if self._objects.knows_place_of(loader):
            return iter(loader)
        now = self._objects.generators()
        self._objects.set_generators(current.generators)
        iterator = iter(loader)
        for number in range(current.taken):
            try:
                next(iterator)
            except StopIteration:
                raise UserError(
                    f"batches: the loader gave {number} batches in a pass that had at least {current.taken} before"
                ) from None
        self._objects.set_generators(now)
        return iterator

    def find_foreign(self) -> bool:
        """Whether the loop is in the middle of a pass over a DataLoader that it reads by itself; once per loop."""
        module: Any = sys.modules.get("torch.utils.data.dataloader")
        if module is None or self._active:
            return False
        kinds = (module._SingleProcessDataLoaderIter, module._MultiProcessingDataLoaderIter)
        for found in gc.get_objects():
            if type(found) in kinds and found._num_yielded > 0:
                try:
                    length = len(found)
                except TypeError:  # of a stream
                    length = sys.maxsize
                if found._num_yielded < length:
                    self.foreign = [found._num_yielded, length]
        return bool(self.foreign)
