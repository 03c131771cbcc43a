"""Masked sums: the bits of `reproducible`, who the ranks are, and what is opened if one is lost. Ranks are threads."""

import threading

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

import fedmpi
import fedmpi.algorithms
from fedmpi.aggregation import Layout, Moment, hidden_sums
from fedmpi.aggregation.masked import Masked
from fedmpi.aggregation.masks import Session
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.sending import Sending
from fedmpi.algorithms.base import Algorithm
from fedmpi.comm.ranks import RanksLost
from fedmpi.comm.solo import SoloLink
from fedmpi.comm.vectors import Slices
from fedmpi.federation import Federation, Plan, Variables
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import known
from fedmpi.oracles import FunctionOracle
from fedmpi.tasks.base import of_clients

DIM = 40_000


class Job:
    """Ranks that are threads; `lost`: (rank that is lost, in which sum, counted from 0, ranks that have its result)."""

    def __init__(self, size, lost=None):
        self.size, self.lost, self.given = size, lost, {}
        self.barrier = threading.Barrier(size, timeout=30)

    def run(self, action):
        """[what `action(link)` returns or raises on each rank]."""
        found = [None] * self.size

        def work(rank):
            try:
                found[rank] = action(ThreadLink(self, rank))
            except BaseException as error:  # looked at by the test
                found[rank] = error

        threads = [threading.Thread(target=work, args=[rank]) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


class Gone(Exception):
    """This rank was killed."""


class ThreadLink(SoloLink):
    def __init__(self, job, rank):
        super().__init__()
        self.job, self.rank, self.size = job, rank, job.size
        self.members, self.survives = tuple(range(job.size)), job.lost is not None
        self.sent, self.num_sums = [], 0

    def of_all(self, value):
        """{rank: value} of the ranks that are left."""
        self.job.given[self.rank] = value
        self.job.barrier.wait()
        found = {rank: self.job.given[rank] for rank in self.members}
        self.job.barrier.wait()
        return found

    def allgather(self, values, kind):
        return np.array(list(self.of_all(np.array(values, np.float64)).values()))

    def allgatherv(self, values, kind):
        return np.concatenate(list(self.of_all(np.array(values, np.float64)).values()))

    def exchange_slices(self, vectors, reduce, out, dtype=None, kind="own"):
        everyone = self.of_all([vector.clone() for vector in vectors])
        of_ranks = (vector for of_rank in everyone.values() for vector in of_rank)
        out.copy_(reduce(Slices(of_ranks, slice(0, len(out)))))

    def add_integers(self, block, kind):
        number, self.num_sums = self.num_sums, self.num_sums + 1
        self.sent.append(block.clone())
        blocks = self.of_all(block.clone())
        total = sum(blocks.values())
        if self.job.lost is not None and number == self.job.lost[1]:
            rank, _, who_has_it = self.job.lost
            if self.rank == rank:
                raise Gone
            if self.rank == 0:
                self.job.barrier = threading.Barrier(self.size - 1, timeout=30)
            if self.rank in who_has_it:
                block.copy_(total)
            threading.Event().wait(0.2)  # all have the new barrier
            self.members, self.size = tuple(r for r in self.members if r != rank), self.size - 1
            self.rank = self.rank  # as it was started: `members` has gaps
            raise RanksLost
        block.copy_(total)


class Words(Reproducible):
    """As if a rank had several clients."""

    _sends_words = True


def row_of(rank):
    return torch.randn(DIM, generator=torch.Generator().manual_seed(rank))


def average(link, aggregation, serial=0, weights=None):
    """(what the aggregation makes of one client of each rank, the sums of its terms)."""
    aggregation.open(link, Layout(("x",), DIM, DIM, torch.float32, "cpu"), [link.rank])
    weights = weights or {rank: 1.0 + rank for rank in range(link.size)}
    aggregation.begin(Moment(0, 0, ("x",), slice(0, DIM), serial), weights)
    aggregation.take(link.rank, row_of(link.rank))
    aggregation.scale([(DIM, 8)], [([0.1 * link.rank, 0.5], 8), ([weights[link.rank]], 8)])
    out = torch.empty(DIM)
    aggregation.average(out)
    return out, aggregation.sums


@pytest.mark.parametrize(("size", "neighbours"), [(3, 0), (5, 0), (5, 1), (5, 2), (6, 3), (6, 4)])
def test_the_sum_is_that_of_reproducible_and_what_is_sent_is_random(size, neighbours):
    links = {}

    def both(link):
        links[link.rank] = link
        aggregations = Words(), Masked(neighbours=neighbours), Reproducible()
        return [average(link, aggregation) for aggregation in aggregations]

    for (plain, of_terms), *others in Job(size).run(both):
        assert all(torch.equal(plain, other) and of_terms == of_other for other, of_other in others)
    for link in links.values():
        plain, hidden = (words[:DIM] for words in link.sent[:2])
        assert not (plain == hidden).any()
        a, b = plain.numpy().astype(float), hidden.numpy().astype(float)
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / DIM**0.5
        counts = np.bincount(np.frombuffer(hidden.numpy().tobytes(), np.uint8), minlength=256)
        expected = hidden.nbytes / 256
        assert ((counts - expected) ** 2 / expected).sum() < 360, "255 degrees of freedom, at 1e-5"


def test_hidden_weights_are_added_up():
    def hidden(link):
        weights = {rank: 1.0 + rank if rank == link.rank else 1.0 for rank in range(link.size)}
        return average(link, Masked(hidden_weights=True), weights=weights)

    plain = Job(4).run(lambda link: average(link, Reproducible()))[0]
    for row, sums in Job(4).run(hidden):
        assert torch.equal(row, plain[0]) and [*sums[:-1]] == [*plain[1][:-1]] and sums[-1] == 1 + 2 + 3 + 4


@pytest.mark.parametrize("aggregation", [Reproducible(), Masked(least_ranks=1)])
def test_weights_that_are_not_known_are_refused_where_they_are_not_added_up(aggregation):
    plan, oracles = Plan(2, hidden_weights={0: 2.0, 1: 5.0}), dict.fromkeys(range(2), of_function)
    start = Variables(torch.tensor([4.0]))
    with pytest.raises(UserError, match="ranks do not know those of others: expected aggregation masked with hidden"):
        Federation(fedmpi.algorithms.FedAvg(), SoloLink(), oracles, plan, start, Sending(aggregation))


@pytest.mark.parametrize("name", ["fedavg", "fafed", "scaffold", "fednova"])
def test_federations_with_hidden_weights_make_the_rows_of_others(name):
    weights, rows = {0: 2.0, 1: 5.0, 2: 0.3}, []
    for plan, aggregation in (
        (Plan(3, 2, weights=[*weights.values()]), Reproducible()),
        (Plan(3, 2, hidden_weights=weights), Masked(least_ranks=1, hidden_weights=True)),
    ):
        start, oracles = Variables(torch.linspace(-1, 1, 9)), dict.fromkeys(range(3), of_function)
        algorithm = known(fedmpi.algorithms, Algorithm)[name]()
        federation = Federation(algorithm, SoloLink(), oracles, plan, start, Sending(aggregation))
        federation.start()
        for _ in range(3):
            federation.run_round()
        rows.append(federation.server.x.clone())
    assert torch.equal(*rows)


def test_keys_are_shared_by_pairs_and_new_at_every_start():
    def keys(link):
        session = Session(link, "", "")
        return {other: session.between(other) for other in range(4) if other != link.rank}

    first, second = Job(4).run(keys), Job(4).run(keys)
    of_pairs = {frozenset((a, b)): first[a][b] for a in range(4) for b in first[a]}
    assert all(first[a][b] == first[b][a] for a in range(4) for b in first[a])
    assert len({*of_pairs.values()}) == len(of_pairs) == 6
    assert first[0][1] != second[0][1]


@pytest.mark.parametrize("number", range(8))
def test_neighbours_are_mutual_and_connected(number):
    ranks = [0, 1, 3, 4, 5, 7]
    found = Job(8).run(lambda link: Session(link, "", "").neighbours(ranks, number))
    assert found[2] == found[6] == []
    for rank in ranks:
        assert rank not in found[rank] and all(rank in found[other] for other in found[rank])
        assert len(found[rank]) == (5 if number == 0 else min(5, number + number % 2))
    seen = {0}
    for _ in ranks:
        seen |= {other for rank in seen for other in found[rank]}
    assert seen == {*ranks}


def test_no_key_has_a_number_twice(monkeypatch):
    used, lock = [], threading.Lock()

    class Counted(hidden_sums.Stream):
        def __init__(self, key, nonce):
            with lock:
                used.append((threading.get_ident(), key, nonce))
            super().__init__(key, nonce)

    monkeypatch.setattr(hidden_sums, "Stream", Counted)

    def work(link):
        aggregation = Masked()
        average(link, aggregation)
        for serial in (1, 2):
            aggregation.begin(Moment(0, 0, ("x",), slice(0, DIM), serial), {rank: 1.0 for rank in range(link.size)})
            aggregation.take(link.rank, row_of(link.rank))
            aggregation.scale([(DIM, 8)], [])
            aggregation.average(torch.empty(DIM))
            aggregation.add_hidden([[1.0]])

    assert Job(3).run(work) == [None] * 3
    assert len({*used}) == len(used) == 3 * 2 * 5

    def twice(link):
        """The sum that loses a rank, and again without it."""
        aggregation, all_ranks = Masked(), link.size
        try:
            average(link, aggregation)
        except RanksLost:
            weights = {rank: 1.0 for rank in range(all_ranks) if rank in link.members}
            aggregation.begin(Moment(0, 0, ("x",), slice(0, DIM), 1), weights)
            aggregation.take(link.rank, row_of(link.rank))
            aggregation.scale([(DIM, 8)], [])
            aggregation.average(torch.empty(DIM))

    used.clear()
    *left, lost = Job(5, (4, 0, ())).run(twice)
    assert left == [None] * 4 and isinstance(lost, Gone)
    own = [one for one in used if one[0] == used[0][0]]
    assert len({*used}) == len(used) and len(own) >= 4


def test_metrics_are_sums():
    numbers, values = [[10], [30], [0]], [[0.5], [0.25], [np.nan]]

    def both(link):
        plain = of_clients(link, {"loss": values[link.rank]}, numbers[link.rank], "samples")
        Masked().open(link, Layout(("x",), 1, 1, torch.float32, "cpu"), [link.rank])
        return plain, of_clients(link, {"loss": values[link.rank]}, numbers[link.rank], "samples")

    for (plain, clients), (hidden, hidden_clients) in Job(3).run(both):
        assert hidden == pytest.approx(plain) and len(hidden) == 2
        assert len(clients["loss"]) == 3 and hidden_clients == {}


@pytest.mark.parametrize("who_has_it", [(), (0,), (1, 0)])
@pytest.mark.parametrize("in_sum", [0, 1])
def test_a_sum_is_opened_for_all_or_for_none(in_sum, who_has_it):
    """Rank 3 is lost in the sum (0), or while keys are opened (1), which some have received then."""
    made = {}

    def work(link):
        made[link.rank] = aggregation = Masked()
        return average(link, aggregation)

    plain = Job(4).run(lambda link: average(link, Reproducible()))[0]
    found = Job(4, (3, in_sum, who_has_it)).run(work)
    assert isinstance(found[3], Gone)
    if in_sum == 1 and who_has_it:
        assert all(torch.equal(hidden, plain[0]) and sums == plain[1] for hidden, sums in found[:3])
    else:
        assert all(isinstance(error, RanksLost) for error in found[:3])


def keys_in(folder, number):
    """(file with the public keys of ranks, path of their private keys with {rank})."""
    lines = []
    for rank in range(number):
        key = Ed25519PrivateKey.generate()
        (folder / f"key{rank}").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        lines.append(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() + f" silo {rank}")
    (folder / "known").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder / "known"), str(folder / "key{rank}")


def test_known_keys_name_the_rank_whose_key_was_swapped(tmp_path):
    known_keys, key = keys_in(tmp_path, 3)
    plain = Job(3).run(lambda link: average(link, Reproducible()))[0]
    found = Job(3).run(lambda link: average(link, Masked(known_keys=known_keys, key=key)))
    assert all(torch.equal(hidden, plain[0]) for hidden, _ in found)
    lines = (tmp_path / "known").read_text(encoding="utf-8").splitlines()
    (tmp_path / "key1").write_bytes(
        Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    )
    for error in Job(3).run(lambda link: average(link, Masked(known_keys=known_keys, key=key))):
        assert "rank 1 has signed its key of this run with another key" in str(error)
    (tmp_path / "known").write_text("\n".join(lines[:2]), encoding="utf-8")
    for error in Job(3).run(lambda link: average(link, Masked(known_keys=known_keys, key=key))):
        assert "2 lines: expected one for each of the 3 ranks" in str(error)
    for error in Job(3).run(lambda link: average(link, Masked(known_keys=known_keys))):
        assert "no aggregation.key" in str(error)


def of_function(state):
    return FunctionOracle(gradient, state)


def gradient(client, x, sample):
    return (1 + 0.1 * torch.sin(torch.arange(x.numel(), dtype=x.dtype) * sample + client)) * (x - client)


@pytest.mark.parametrize("name", known(fedmpi.algorithms, Algorithm))
def test_every_algorithm_makes_the_rows_of_reproducible(name):
    algorithm = known(fedmpi.algorithms, Algorithm)[name]()
    ascent = slice(4, 5) if type(algorithm).__module__.endswith("minmax") else None

    def rows(aggregation):
        settings = {"num_clients": 5, "rounds": 3, "local_steps": 2, "ascent": ascent}
        x0, sending = [1.0, -0.5, 0.0, 2.0, 0.3], Sending(aggregation)
        return fedmpi.simulate(algorithm, gradient, x0, **settings, sending=sending)[-1]["rows"]

    hidden = Masked(least_ranks=1)
    if any(exchange.alone for exchange in algorithm.exchanges()):
        with pytest.raises(UserError, match="hides what single clients send"):
            rows(hidden)
        return
    expected = rows(Reproducible())
    assert all(np.array_equal(row, expected[each]) for each, row in rows(hidden).items())


def test_too_few_ranks_are_refused_in_one_line():
    with pytest.raises(UserError, match="needs at least 3 ranks with clients that take part, not 1"):
        fedmpi.simulate(fedmpi.algorithms.FedAvg(), gradient, [1.0], rounds=1, sending=Sending(Masked()))
