"""Rows that skip rounds: what a client keeps, what all of them get, and what is refused."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi.aggregation.sending import Sending
from fedmpi.algorithms import DESLOC, FAFEDCode, FedAvg, LocalAdam
from fedmpi.comm.solo import SoloLink
from fedmpi.federation import Federation, Plan, Variables
from fedmpi.federation.client_state import SKIPPED
from fedmpi.federation.memory import num_bytes
from fedmpi.federation.rows import RowStore
from fedmpi.ground.errors import UserError
from fedmpi.oracles import FunctionOracle
from fedmpi.oracles.flat_module import BufferPart

DIM = 3
SETTINGS = {"step_size": 0.05, "epsilon": 0.1}


def gradient(client, x, sample):
    return (1 + client) * (x - client) + 0.1 * np.sin(sample + client)


def federation_of(algorithm, num_clients=3, participants=None, sending=None, buffers=None, oracle=FunctionOracle):
    make = functools.partial(oracle, gradient)
    parts = [BufferPart("mean", 0, len(buffers), torch.float64)] if buffers is not None else None
    variables = Variables(torch.linspace(-1, 1, DIM, dtype=torch.float64), buffers, buffer_parts=parts)
    plan = Plan(num_clients, 2, participants)
    federation = Federation(
        algorithm, SoloLink(), dict.fromkeys(range(num_clients), make), plan, variables, sending, poison=True
    )
    federation.start()
    return federation


@pytest.mark.parametrize("num_clients", [1, 3])
def test_the_average_replaces_what_a_client_has_also_if_it_is_absent(num_clients):
    """m is averaged after rounds 2 and 4; client 0 is absent in round 2."""

    def participants(round_index):
        return [c for c in range(num_clients) if c or round_index != 1] or [0]

    federation = federation_of(DESLOC(**SETTINGS, m_every=2, v_every=9), num_clients, participants)
    flags = []
    for _ in range(4):
        federation.run_round()
        flags.append([sorted(client.skipped) for client in federation.clients])
    assert flags[0] == [["m", "v"]] * num_clients and flags[1] == flags[3] == [["v"]] * num_clients
    assert not federation.server.v.any() and federation.server.m.any()  # the server's v has never been averaged
    assert all(client.kept[SKIPPED]["v"].all() for client in federation.clients)


def test_a_restored_federation_goes_on_with_the_same_bits():
    def participants(round_index):
        return [round_index % 3, (round_index + 1) % 3]

    algorithm = FAFEDCode(**SETTINGS, m_every=2, v_every=3)
    whole = federation_of(algorithm, participants=participants)
    for _ in range(7):
        whole.run_round()
    for first in range(1, 7):
        before = federation_of(algorithm, participants=participants)
        for _ in range(first):
            before.run_round()
        after = federation_of(algorithm, participants=participants)
        after.restore(before.state())
        for _ in range(7 - first):
            after.run_round()
        for name, row in whole.server.rows.items():
            assert torch.equal(row, after.server.rows[name]), (first, name)


def test_one_that_is_left_out_keeps_what_it_had():
    class Bad(FunctionOracle):
        def gradient(self, z, xi):
            g = super().gradient(z, xi)
            return g * np.nan if self.client.index == 1 and self.client.round_index == 1 else g

    federation = federation_of(DESLOC(**SETTINGS, m_every=3), sending=Sending(faulty="leave_out"), oracle=Bad)
    federation.run_round()
    client = federation.clients[1]
    kept = {name: row.clone() for name, row in client.kept[SKIPPED].items()}
    federation.run_round()
    assert client.skipped == {"m", "v"} and federation.left_out.clients == {1}
    for name, row in client.kept[SKIPPED].items():
        assert torch.equal(row, kept[name]) and row.isfinite().all()


def test_buffers_are_averaged_in_every_round():
    """They go with the row that skips none, wherever the algorithm names it."""

    class Counting(FunctionOracle):
        def gradient(self, z, xi):
            self.client.buffers += self.client.index
            return super().gradient(z, xi)

    federation = federation_of(
        LocalAdam(**SETTINGS, m_every=2, v_every=3), buffers=torch.zeros(2, dtype=torch.float64), oracle=Counting
    )
    for number in range(1, 7):
        federation.run_round()
        np.testing.assert_allclose(federation.store.buffers, number * 2 * 1.0)  # the mean of 0, 1 and 2, twice a round


def test_bytes_are_exact():
    federation = federation_of(DESLOC(**SETTINGS))
    sent = []
    for _ in range(6):
        before = federation.link.traffic.nbytes
        federation.run_round()
        sent.append((federation.link.traffic.nbytes - before) // (8 * DIM))
    assert sent == [1, 1, 2, 1, 1, 3] and federation.link.traffic.nbytes == 8 * DIM * 9


def test_a_period_of_one_is_local_adam_to_the_bit():
    both = [federation_of(cls(**SETTINGS, m_every=1, v_every=1)) for cls in (LocalAdam, DESLOC)]
    for federation in both:
        for _ in range(3):
            federation.run_round()
    assert torch.equal(*(federation.server.x for federation in both))
    assert both[0].link.traffic.collectives == 3


def test_one_row_of_memory_for_each_row_and_client():
    usual, rare = (
        num_bytes(RowStore(LocalAdam(m_every=m, v_every=m), dim=100, buffers=None, num_local=1, dtype=torch.float32))
        for m in (1, 2)
    )
    assert rare - usual == 2 * 100 * 4


def test_what_cannot_be_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Rare(FedAvg):
        def exchanges(self):
            return (fedmpi.Exchange(("x",), then=self.server_step, due=lambda server: server.round_index % 2),)

    class Apart(LocalAdam):
        def exchanges(self):
            return (fedmpi.Exchange(("x", "v")), fedmpi.Exchange(("m",), due=lambda server: False))

    class Torn(LocalAdam):
        def exchanges(self):
            return (fedmpi.Exchange(("x", "v")), fedmpi.Exchange(("m",)))

    with pytest.raises(UserError, match="all its exchanges skip rounds .due., and the model has float buffers"):
        federation_of(Rare(), buffers=torch.zeros(2, dtype=torch.float64))
    federation_of(Rare()).run_round()
    federation_of(Apart()).run_round()
    with pytest.raises(UserError, match=r"an exchange has the rows \('x', 'v'\): expected consecutive ones of"):
        federation_of(Torn())
    with pytest.raises(UserError, match="algorithm.m_every = 2: expected 1, or sync_order code"):
        FAFEDCode(m_every=2, sync_order="paper")
