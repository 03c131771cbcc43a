"""A check that the state which all ranks replicate is equal on all of them. Collective on the federation's link."""

import collections

import torch

from fedmpi.comm.job.equality import digest
from fedmpi.ground.errors import AgreedUserError, ReplicasDiffer
from fedmpi.ground.text import Log

log = Log(__name__)

ROUNDING = 1e-5  # largest relative difference that an MPI's sums in different orders may leave
HASH_DIGITS = 12  # hexadecimal, as many as a float64 holds exactly


def check_replicas(federation):
    """Compare the server's rows, the averaged rows and each float buffer between all ranks.

    Raises:
        ReplicasDiffer: on every rank, if one differs.
    """
    found = _first_difference(federation)
    if found:
        raise ReplicasDiffer(
            f"after round {federation.round_index}: {found[0]} {found[1]}: a processor, memory or network "
            "changed a value, or an algorithm does not do the same on all ranks"
        )


def check_result(federation):
    """The same after the last round, when the result is saved: a line says what differs, and by how much.

    Raises:
        AgreedUserError: on every rank, if it is more than sums in different orders leave.
    """
    found = _first_difference(federation)
    if not found:
        return
    name, difference, row = found
    link, of_rank_0 = federation.link, row.detach().cpu().clone()
    link.broadcast(of_rank_0.view(torch.uint8).numpy(), "model")
    of_rank_0, own_row = of_rank_0.double(), row.detach().cpu().double()
    apart = (own_row - of_rank_0).abs().max() / of_rank_0.abs().max().clamp(min=1e-30)
    largest = link.allgather([float(apart)], "average digests").max()
    line = f"after the last round {name} {difference}: the largest relative difference is {largest:.3g}"
    if not largest <= ROUNDING:
        hint = "the ranks have different models; that of rank 0 is the one that was saved"
        raise AgreedUserError(f"{line}: {hint}", link.rank == 0)
    if link.rank == 0:
        log.warning(line)


def _first_difference(federation):
    """(name of the first row that is not equal on all ranks, what is different as text, the row); None if all are."""
    store, link = federation.store, federation.link
    rows = {f"row {name}": row for name, row in {**store.averaged_rows(), **store.server_rows()}.items()}
    rows |= {f"buffer '{part.name}'": part.of(store.buffers) for part in store.tail.sent.parts}
    everyone = link.allgather([float(int(digest(row)[:HASH_DIGITS], 16)) for row in rows.values()], "average digests")
    for (name, row), digests in zip(rows.items(), everyone.T.tolist()):
        (usual, count), *others = collections.Counter(digests).most_common()
        if not others:
            continue
        if count > others[0][1]:
            odd = [rank for rank, found in enumerate(digests) if found != usual]
            return name, f"on rank {', '.join(map(str, odd))} is not that of the other ranks", row
        return name, "is not the same on all ranks", row
    return None
