"""What aggregations are made of: sums of integers that wrap, slices of all vectors, vectors of any lengths."""

import dataclasses

import pytest
import torch

import fedmpi.algorithms
from fedmpi.aggregation import Aggregation
from fedmpi.aggregation.sending import Sending
from fedmpi.aggregation.stages.norm_bound import NormBound
from fedmpi.comm.solo import SoloLink
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.federation import Federation, Plan, Variables
from fedmpi.federation.participation import spread
from fedmpi.oracles import FunctionOracle

SIZES = (0, 1, 5, 40_001, 3_000_000)  # on both sides of where transports change, and of the size of a message
TRANSPORTS = ("allreduce", "shared")


def words(rank, numel, dtype):
    """Words of which a sum of two overflows about every other time."""
    info = torch.iinfo(dtype)
    draws = torch.randint(info.min, info.max, (numel,), generator=torch.Generator().manual_seed(rank))
    return draws.to(dtype)


@pytest.mark.mpi
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sums_of_integers_wrap(open_link, transport, dtype):
    link = open_link(transport if MPILink().size > 1 else "auto")
    bits = torch.iinfo(dtype).bits
    for numel in SIZES[:4]:
        block = link.allocate(numel, dtype)
        block.copy_(words(link.rank, numel, dtype))
        link.add_integers(block)
        expected = [
            sum(column) % 2**bits for column in zip(*(words(r, numel, dtype).tolist() for r in range(link.size)))
        ]
        assert [value % 2**bits for value in block.tolist()] == expected


@pytest.mark.mpi
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("held", [lambda rank: 1, lambda rank: int(rank == 0), lambda rank: rank % 3 + 1])
def test_each_rank_reduces_a_slice_of_all_vectors(open_link, transport, numel, dtype, held):
    link = open_link(transport if MPILink().size > 1 else "auto")

    def vector(rank, k):
        return ((torch.arange(numel) * (7 * rank + k + 1)) % 101 - 50).to(dtype)

    def largest(slices):
        return torch.stack(slices).amax(0)

    out = link.allocate(numel, dtype)
    mine = [vector(link.rank, k) for k in range(held(link.rank))]
    if len(mine) == 1:
        mine = [out.copy_(mine[0])]

    def of_some(slices):
        assert slices[0].numel()  # a median fails on none
        return largest(slices)

    link.exchange_slices(mine, of_some, out)
    assert torch.equal(out, largest([vector(rank, k) for rank in range(link.size) for k in range(held(rank))]))


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64])
def test_vectors_of_any_lengths_are_gathered(open_link, dtype):
    link = open_link("auto")
    vectors = [(torch.arange(1000 * rank) % 13 + rank).to(dtype) for rank in range(link.size)]
    for found, expected in zip(link.allgather_vectors(vectors[link.rank]), vectors, strict=True):
        assert torch.equal(found, expected)


@dataclasses.dataclass(kw_only=True)
class TrimmedMean(Aggregation):
    """The mean without the smallest and the largest value."""

    def average(self, out):
        def trimmed(slices):
            return torch.stack(slices).sort(dim=0).values[1:-1].mean(0)

        return self.reduce_slices(trimmed, out)


def rows_after_three_rounds(name, link, clients, dim):
    slopes = torch.linspace(0.5, 1.5, dim, dtype=torch.float64)
    ascent = slice(dim - 2, dim) if getattr(fedmpi.algorithms, name).__module__.endswith("minmax") else None

    def oracle(client):
        return FunctionOracle(
            lambda index, x, sample: slopes * (x - index) + 0.1 * torch.sin(x + sample), client, ascent
        )

    variables = Variables(torch.linspace(-1, 1, dim, dtype=torch.float64), ascent=ascent)
    sending = Sending(TrimmedMean(), [NormBound(bound=3.0)])
    federation = Federation(
        getattr(fedmpi.algorithms, name)(), link, dict.fromkeys(clients, oracle), Plan(6, 2), variables, sending
    )
    federation.start()
    for _ in range(3):
        federation.run_round()
    return {**federation.store.averaged_rows(), **federation.store.server_rows()}


@pytest.mark.mpi
@pytest.mark.parametrize("name", sorted(set(fedmpi.algorithms.__all__) - {"Algorithm", "Exchange"}))
def test_an_own_aggregation_serves_every_algorithm(open_link, name):
    link = open_link("auto")
    dim = 9000 if name == "FAFED" else 30
    found = rows_after_three_rounds(name, link, spread(6, link.size)[link.rank], dim)
    for row, values in rows_after_three_rounds(name, SoloLink(), range(6), dim).items():
        assert torch.isfinite(values).all()
        assert torch.equal(found[row], values), row
