"""A check that the state which all ranks replicate is equal on all of them."""

import collections
import hashlib

from fedmpi.errors import ReplicasDiffer

HASH_BYTES = 6  # as many as a float64 holds exactly


def check_replicas(federation):
    """Compare hashes of the server's rows, the averaged rows and the buffers between all ranks. Collective.

    Raises:
        ReplicasDiffer: on every rank, if one differs.
    """
    store, link = federation.store, federation.link
    rows = {f"row {name}": row for name, row in {**store.averaged_rows(), **store.server_rows()}.items()}
    rows["the buffers"] = store.buffers
    everyone = link.allgather([_hash(row) for row in rows.values()])
    for name, hashes in zip(rows, everyone.T.tolist()):
        (usual, count), *others = collections.Counter(hashes).most_common()
        if not others:
            continue
        if count > others[0][1]:
            odd = [rank for rank, found in enumerate(hashes) if found != usual]
            what = f"on rank {', '.join(map(str, odd))} is not that of the other ranks"
        else:
            what = "is not the same on all ranks"
        raise ReplicasDiffer(
            f"after round {federation.round_index}: {name} {what}: a processor, memory or network "
            "changed a value, or an algorithm does not do the same on all ranks"
        )


def _hash(row):
    """A hash of a row's bytes as a number."""
    data = row.detach().cpu().contiguous().numpy()
    return float(int.from_bytes(hashlib.blake2b(data, digest_size=HASH_BYTES).digest(), "little"))
