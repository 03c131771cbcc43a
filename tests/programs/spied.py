"""What other ranks can see of one under --aggregation masked: its messages, and what it has in shared memory.

Under mpirun with 3 ranks: 3 rounds, then 3 more of a federation that goes on from its state, by each of two transports.
No row of a client occurs there as bytes, words are not correlated with it, bytes are spread evenly, and no key is used
twice with a nonce. The same with --aggregation reproducible shows that the spy sees rows.
"""

import pathlib
import sys
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "machinery"))

import numpy as np
import recorder as recording
import torch

recorder = recording.install()
from mpi4py import MPI  # noqa: E402

from fedmpi.aggregation import hidden_sums  # noqa: E402
from fedmpi.aggregation.masked import Masked  # noqa: E402
from fedmpi.aggregation.reproducible import Reproducible  # noqa: E402
from fedmpi.aggregation.sending import Sending  # noqa: E402
from fedmpi.algorithms import FedNova  # noqa: E402
from fedmpi.comm.sums.mpi import MPILink  # noqa: E402
from fedmpi.federation import Federation, Plan, Variables  # noqa: E402
from fedmpi.oracles import FunctionOracle  # noqa: E402

DIM, EACH = 300_000, 2
seen, plain, sums, used = [], [], [], set()


class Counted(hidden_sums.Stream):
    """A stream whose key has not had the nonce before."""

    def __init__(self, key, nonce):
        assert (key, nonce) not in used
        used.add((key, nonce))
        super().__init__(key, nonce)


class Kept:
    """Keeps the values and words that a rank must not show."""

    def add(self, client, region, weight):
        plain.append(region.numpy().copy())
        super().add(client, region, weight)

    def _encoded(self, number, dtype):
        pieces = []
        for place, total in super()._encoded(number, dtype):
            pieces.append(total.numpy().copy())
            yield place, total
        plain.append(np.concatenate(pieces))

    def _decode(self, words, out):
        sums.append(words.numpy().copy())
        super()._decode(words, out)


class KeptMasked(Kept, Masked):
    """Masked, spied on."""


class KeptReproducible(Kept, Reproducible):
    """Reproducible, spied on."""


def gradient(client, x, sample):
    i = torch.arange(x.numel(), dtype=x.dtype)
    return (1 + 0.3 * torch.cos(client + i)) * (x - client) + 0.1 * torch.sin(i * sample)


def rounds(transport, aggregation, state=None):
    """The state after 3 rounds of two clients on each rank."""
    link = MPILink(MPI.COMM_WORLD, transport=transport)
    clients = range(EACH * link.rank, EACH * (link.rank + 1))
    oracles = {client: lambda state: FunctionOracle(gradient, state) for client in clients}
    start = Variables(torch.randn(DIM, generator=torch.Generator().manual_seed(1)))
    plan = Plan(EACH * link.size, 2, weights=[1.0 + client for client in range(EACH * link.size)])
    federation = Federation(FedNova(step_size=0.1), link, oracles, plan, start, Sending(aggregation))
    if state is None:
        federation.start()
    else:
        federation.restore(state)
    for _ in range(3):
        federation.run_round()
    state = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in federation.state().items()
    }
    del federation
    link.close()
    return state


def found_rows():
    """How many short pieces of rows and words are in what was seen."""
    everything = b"".join(seen)
    pieces = (row.tobytes()[begin : begin + 64] for row in plain for begin in range(0, row.nbytes - 64, 40_000))
    return sum(piece in everything for piece in pieces if len({*piece}) > 8)


def check_words():
    """Words that others see look like random ones."""
    rows = [row for row in plain if row.size >= DIM]
    messages, looked_at = (np.frombuffer(each, np.int64)[:DIM] for each in seen if len(each) >= 8 * DIM), 0
    for words in messages:
        # Once it is made, all have the sum, also in shared memory, which was 0 before.
        hidden = words != 0
        for total in (total for total in sums if total.size >= DIM):
            hidden &= words != total[:DIM]
        words, looked_at = words[hidden], looked_at + hidden.all()
        if hidden.sum() < DIM / 3:
            continue
        counts = np.bincount(words.view(np.uint8), minlength=256)
        expected = words.nbytes / 256
        assert ((counts - expected) ** 2 / expected).sum() < 360, "chi-square of 255 degrees of freedom at 1e-5"
        for row in rows:
            for a, b in ((words, row), (words.view(np.uint64), row)):
                found = np.corrcoef(a.astype(float), b[:DIM][hidden].astype(float))[0, 1]
                assert abs(found) < 5.5 / len(words) ** 0.5, found  # 0.01 of all
    return looked_at


def main():
    hidden_sums.Stream = Counted
    recorder.look = lambda buffer: seen.append(bytes(buffer.cast("B")))
    for transport in ("shared", "allreduce"):
        rounds(transport, KeptReproducible())
        assert found_rows() > 100, "the spy sees nothing"
        del seen[:], plain[:], sums[:]
        state = rounds(transport, KeptMasked())
        rounds(transport, KeptMasked(), state)
        assert found_rows() == 0
        number = check_words()
        assert number >= 6, number
        del seen[:], plain[:], sums[:]
        if MPI.COMM_WORLD.rank == 0:
            print("hidden:", transport, number, "messages", len(used), "streams", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main()
    except BaseException:
        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
