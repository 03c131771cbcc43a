"""Stages see a client's rows before they are summed, and may change them."""

import copy
import dataclasses
import functools
import math
import os
import re
import threading

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi.aggregation import Aggregation
from fedmpi.aggregation.codecs.half import Half
from fedmpi.aggregation.coded import MeanOfSlices
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.sending import Sending, chosen
from fedmpi.aggregation.stages import SecretStream, Sent, Stage
from fedmpi.aggregation.stages.norm_bound import PIECE, NormBound
from fedmpi.algorithms import FAFED, FedAvg, MimeAdam
from fedmpi.comm.solo import SoloLink
from fedmpi.federation import Federation, Plan, Variables
from fedmpi.federation.client_state import state_of_client
from fedmpi.ground.errors import Diverged, UserError
from fedmpi.oracles import FunctionOracle

DIM = 4


def make_federation(algorithm, num_clients, stages, weights=None):
    """Clients with f_i = ½ (x - i)² in one process, after the start."""
    oracle = functools.partial(FunctionOracle, lambda client, x, sample: x - client)
    variables = Variables(torch.full((DIM,), 4.0, dtype=torch.float64))
    plan, sending = Plan(num_clients, 2, weights=weights), Sending(stages=stages)
    federation = Federation(algorithm, SoloLink(), dict.fromkeys(range(num_clients), oracle), plan, variables, sending)
    federation.start()
    return federation


class Spy(Stage):
    """Writes down what it sees."""

    needs_start = True
    kept_rows = ("seen",)

    def __init__(self):
        super().__init__()
        self.calls = []  # which copies of it share

    def apply(self, sent):
        own = {name: row.clone() for name, row in sent.rows.items()}
        before = {name: row.clone() for name, row in sent.start.items()}
        count = {name: row.clone() for name, row in sent.kept["seen"].items() if name in sent.rows}
        self.calls.append((sent.client, sent.moment.round_index, own, before, count))
        assert sent.moment.rows == tuple(own)
        for name in sent.rows:
            sent.kept["seen"][name].add_(1)


@pytest.mark.parametrize("num_clients", [1, 3])
def test_a_stage_sees_the_rows_their_start_and_its_own(num_clients):
    spy = Spy()
    federation = make_federation(FedAvg(step_size=0.5), num_clients, [spy])
    assert spy.calls == []  # this algorithm exchanges nothing at its start
    for round_index in range(2):
        x = federation.server.x.clone()
        federation.run_round()
        calls = spy.calls.copy()
        spy.calls.clear()
        assert [(client, now) for client, now, *_ in calls] == [(c, round_index) for c in range(num_clients)]
        for client, _, rows, start, count in calls:
            assert torch.equal(start["x"], x)
            assert torch.equal(rows["x"], client + (x - client) / 4)  # two steps that halve the distance
            assert torch.equal(count["x"], torch.full((DIM,), float(round_index)))
        mean = torch.stack([rows["x"] for _, _, rows, *_ in calls]).mean(0)
        assert torch.allclose(federation.server.x, mean, rtol=1e-14)


@pytest.mark.parametrize("num_clients", [1, 2])
def test_a_stage_sees_every_exchange_with_its_own_rows(num_clients):
    spy = Spy()
    federation = make_federation(FAFED(), num_clients, [spy])
    assert [(now, set(rows)) for _, now, rows, *_ in spy.calls] == [(-1, {"m", "v"})] * num_clients
    spy = Spy()
    federation = make_federation(MimeAdam(), num_clients, [spy])
    federation.run_round()
    assert [set(rows) for _, _, rows, *_ in spy.calls] == [{"c"}] * num_clients + [{"x"}] * num_clients
    assert all(set(start) == set(rows) for _, _, rows, start, _ in spy.calls)


@pytest.mark.parametrize("num_clients", [1, 3])
def test_stages_change_the_rows_in_order_and_before_the_weights(num_clients):
    class Double(Stage):
        def apply(self, sent):
            assert sent.start is None  # no stage asked for it
            assert sent.kept == {}
            sent.rows["x"].mul_(2)

    class AddOne(Stage):
        def apply(self, sent):
            sent.rows["x"].add_(1)

    weights = [3.0, 1.0, 2.0][:num_clients]
    federation = make_federation(FedAvg(step_size=0.5), num_clients, [Double(), AddOne()], weights)
    federation.run_round()
    rows = [2 * (client + (4 - client) / 4) + 1 for client in range(num_clients)]
    expected = sum(w * row for w, row in zip(weights, rows)) / sum(weights)
    assert torch.allclose(federation.server.x, torch.full((DIM,), expected, dtype=torch.float64), rtol=1e-14)


def test_a_stage_that_changes_nothing_changes_no_bit():
    plain, watched = (make_federation(FAFED(), 3, stages) for stages in ([], [Spy()]))
    for federation in (plain, watched):
        for _ in range(3):
            federation.run_round()
    for name, row in plain.store.averaged_rows().items():
        assert torch.equal(row, watched.store.averaged_rows()[name])


@pytest.mark.parametrize("num_clients", [1, 3])
def test_without_stages_nothing_is_copied_or_allocated(num_clients):
    federation = make_federation(FAFED(), num_clients, [])
    assert federation.round_start is None  # no second block
    assert all(client.kept == {} for client in federation.clients)


def test_absent_clients_pass_no_stage():
    spy = Spy()
    federation = make_federation(FedAvg(), 3, [spy])
    object.__setattr__(federation.plan, "participants", lambda round_index: [2])
    federation.run_round()
    assert [client for client, *_ in spy.calls] == [2]


def test_two_stages_of_one_class_keep_their_own_rows():
    federation = make_federation(FedAvg(), 2, [Spy(), Spy()])
    assert list(federation.stages) == ["spy", "spy-2"]
    assert list(federation.clients[1].kept) == ["stages/spy.seen", "stages/spy-2.seen"]
    federation.run_round()
    assert [kept["x"].unique().item() for kept in federation.clients[1].kept.values()] == [1.0, 1.0]


@pytest.mark.parametrize("num_clients", [1, 3])
def test_norm_bound(num_clients):
    """The moves are client - 4 in each coordinate, times 3/4: their norms are 1.5 * (4 - client)."""
    federation = make_federation(FedAvg(step_size=0.5), num_clients, [NormBound(bound=4.0)])
    federation.run_round()
    moves = [min(4.0, 1.5 * (4 - client)) / 2 for client in range(num_clients)]  # in each of 4 coordinates
    assert torch.allclose(federation.server.x, torch.full((DIM,), 4 - sum(moves) / num_clients, dtype=torch.float64))


def test_all_rows_of_a_client_are_one_vector_for_a_norm_bound():
    start = {name: torch.ones(2) for name in ("x", "m")}
    rows = {"x": torch.tensor([4.0, 1.0]), "m": torch.tensor([1.0, -3.0])}  # they move by 3 and 4, together by 5
    NormBound(bound=1.0).apply(Sent(0, 1.0, None, rows, start, {}))
    assert torch.allclose(torch.stack([rows["x"], rows["m"]]), torch.tensor([[1.6, 1.0], [1.0, 0.2]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, PIECE - 1, PIECE, 2 * PIECE + 1])
def test_a_norm_is_that_of_all_values(dim, dtype):
    torch.manual_seed(dim)
    start, moved = torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)
    row, kept = start + moved, (start + moved).clone()
    norm = float((row.double() - start.double()).norm())
    NormBound(bound=1.01 * norm).apply(Sent(0, 1.0, None, {"x": row}, {"x": start}, {}))
    assert torch.equal(row, kept)
    NormBound(bound=0.25 * norm).apply(Sent(0, 1.0, None, {"x": row}, {"x": start}, {}))
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    assert float((row.double() - start.double()).norm()) == pytest.approx(0.25 * norm, rel=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [(3e38, -3e38), (1e30, 0.0)])
def test_a_move_that_is_too_long_for_a_number_becomes_0(values, dtype):
    """So a stage that keeps rows finite need not be looked at again."""
    row, start = (torch.full((3,), value, dtype=dtype) for value in values)
    NormBound(bound=1.0).apply(Sent(0, 1.0, None, {"x": row}, {"x": start}, {}))
    assert torch.equal(row, start)


OPTIMA = np.array([[4.0, -1.0], [0.0, 2.0], [-3.0, 1.0]])


@dataclasses.dataclass(kw_only=True)
class Rounded(Stage):
    """Every row in whole multiples of 2^-10, without feedback of the error."""

    def apply(self, sent):
        for row in sent.rows.values():
            row.mul_(1024).round_().div_(1024)


@pytest.mark.rarely
@pytest.mark.parametrize("stage", [NormBound(bound=0.5), Rounded()])
@pytest.mark.parametrize("c0", ["zero", "gradient"])
@pytest.mark.parametrize("name", ["SCAFFOLD", "SCAFFOLDM", "SCAFFOLDMVR", "CODASCA"])
def test_control_variates_take_note_of_what_is_really_sent(name, c0, stage):
    """c is the mean of c_i after every round, and the clients come to their common optimum."""
    settings = {} if name == "CODASCA" else {"c0": c0}
    plain = {"prox_weight": 0.0} if name == "CODASCA" else {"fresh_weight": 1.0} if name != "SCAFFOLD" else {}
    algorithm = getattr(fedmpi.algorithms, name)(step_size=0.05, **settings, **plain)
    trace = fedmpi.simulate(
        algorithm, lambda i, x, sample: x.numpy() - OPTIMA[i], x0=[5.0, 5.0], rounds=150, local_steps=5,
        participants=lambda r: [r % 3, (r + 1) % 3], sending=Sending(stages=[stage]),
    )  # fmt: skip
    for rows in (record["rows"] for record in trace if record["step"] is None):
        assert np.abs(rows["c"] - rows["c_i"].mean(0)).max() < 1e-12
    assert np.abs(trace[-1]["rows"]["x"][0] - OPTIMA.mean(0)).max() < 0.05


@dataclasses.dataclass(kw_only=True)
class Noise(Stage):
    deviation: float = 0.001

    def open(self, link, layout):
        """A user's, which keeps nothing."""

    def apply(self, sent):
        for row in sent.rows.values():
            row += self.deviation * self.secret.normal(row.numel()).to(row.dtype)


@pytest.mark.parametrize("name, row", [("FAFED", "v"), ("LocalAdam", "v"), ("LocalAMSGrad", "v_mean"), ("FedAvg", "")])
def test_noise_that_is_larger_than_squares_is_said_once(name, row, capsys):
    def run(stage):
        trace = fedmpi.simulate(
            getattr(fedmpi.algorithms, name)(), lambda i, x, sample: 0.01 * (x - i), x0=[4.0] * 50, rounds=20,
            sending=Sending(stages=[stage]),
        )  # fmt: skip
        assert np.isfinite(trace[-1]["rows"]["x"]).all()
        return capsys.readouterr().err.splitlines()

    lines = run(Noise())
    assert len(lines) == bool(row) and not run(Noise(deviation=1e-12)) and not run(NormBound(bound=0.1))
    for line in lines:
        assert re.match(rf"fedmpi: stage noise makes \d+ of 50 positive values of row {row}, means of squares", line)


def test_control_variates_of_private_parts_are_as_without_a_stage_that_changes_nothing():
    """The private coordinate is never sent, but its control variate moves."""
    found = []
    for stages in ((), (Spy(),)):
        oracle = functools.partial(FunctionOracle, lambda client, x, sample: x - client)
        variables = Variables(torch.full((DIM,), 4.0, dtype=torch.float64), private=(slice(1, 2),))
        federation = Federation(
            fedmpi.algorithms.SCAFFOLD(step_size=0.1), SoloLink(), dict.fromkeys(range(2), oracle), Plan(2, 2),
            variables, Sending(stages=stages),
        )  # fmt: skip
        federation.start()
        for _ in range(4):
            federation.run_round()
        found.append(torch.stack([state_of_client(client)["rows/c_i"] for client in federation.clients]))
        assert (found[-1][:, 1] != 0).all()
    assert torch.equal(*found)


@dataclasses.dataclass(kw_only=True)
class BreaksRound(Stage):
    """Makes a value nan in the second round."""

    def apply(self, sent):
        if sent.moment.round_index == 1:
            sent.rows["x"][0] = float("nan")


@dataclasses.dataclass(kw_only=True)
class BreaksAverage(Aggregation):
    """Makes the average infinite in the second round."""

    def average(self, out):
        factor = float("inf") if self.moment.round_index == 1 else 1.0
        self.reduce_slices(lambda slices: torch.stack(slices).mean(0) * factor, out)


@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize(
    ("sending", "part"),
    [
        (Sending(stages=[NormBound(), BreaksRound()]), "stage breaksround made values of row x of client 0 on rank 0"),
        (Sending(BreaksAverage()), "aggregation breaksaverage made values of row x"),
    ],
)
def test_the_part_that_makes_a_value_that_is_not_finite_is_named_in_its_round(rounds, sending, part):
    with pytest.raises(Diverged, match=f"^in round 2: {part} that are not finite$"):
        fedmpi.simulate(FedAvg(), lambda i, x, s: x - i, x0=[9.0, 9.0], rounds=rounds, sending=sending)


def test_numbers_pass_no_stage_and_squares_stay_squares():
    @dataclasses.dataclass(kw_only=True)
    class Shift(Stage):
        def apply(self, sent):
            assert sent.kinds == {"x": "point", "m": "gradient", "v": "square"} or sent.moment.round_index < 0
            for row in sent.rows.values():
                row.sub_(100.0)

    federation = make_federation(FAFED(), 2, [Shift()])
    federation.run_round()
    assert (federation.server.v == 0).all() and (FAFED().epsilon == federation.server.A).all()

    # Each client has its own scores and shares of positives, so that `restart` depends on the numbers.
    scores, shares = [(3.0, -1.0), (30.0, -20.0)], [0.5, 0.2]

    def gradient(client, x, sample):
        theta, a, b, w = x.tolist()
        (positive, negative), q = scores[client], shares[client]
        slopes = [0.001 * theta, 2 * q * (a - positive), 2 * (1 - q) * (b - negative), 1.0 - w]
        return torch.tensor(slopes, dtype=x.dtype)

    coda, found = fedmpi.algorithms.CODA(step_size=1e-4, stage_rounds=2, step_decay=1.0, dual_restart=True), []
    for sending in (None, Sending(stages=[NormBound(bound=5.0)]), Sending(codec=Half())):
        trace = fedmpi.simulate(
            coda, gradient, x0=[0.0] * 4, num_clients=2, rounds=6, local_steps=2, ascent=slice(3, None), sending=sending
        )
        found.append([record["rows"]["x"][0][3] for record in trace])
    assert abs(found[0][-1] + 23.4) < 0.02  # the mean score of negatives minus that of positives
    assert found[1] == found[0]  # no row of the model moves by 5
    assert np.allclose(found[2], found[0], rtol=1e-2)


def test_stages_of_one_name_are_all_passed_and_objects_can_be_used_again():
    def doubling():
        @dataclasses.dataclass(kw_only=True)
        class Same(Stage):
            def __post_init__(self):
                super().__post_init__()
                self.calls = []  # of one federation

            def apply(self, sent):
                self.calls.append(sent.client)
                sent.rows["x"].add_(len(self.calls))

        return Same()

    stages = [doubling(), doubling()]
    finals = []
    for _ in range(2):
        federation = make_federation(FedAvg(step_size=0.5), 1, stages)
        assert list(federation.stages) == ["same", "same-2"]
        federation.run_round()
        finals.append(federation.server.x.tolist())
    assert finals[0] == finals[1] == [1.0 + 2] * DIM


@pytest.mark.parametrize("num_clients", [1, 3])
def test_a_stage_that_computes_in_the_start_changes_nothing_but_its_copy(num_clients):
    class Careless(Stage):
        needs_start = True

        def apply(self, sent):
            sent.start["x"].sub_(sent.rows["x"])

    federations = [make_federation(FedAvg(step_size=0.5), num_clients, stages) for stages in ([], [Careless()])]
    for federation in federations:
        federation.run_round()
        federation.run_round()
    assert torch.equal(federations[0].server.x, federations[1].server.x)


def test_a_kind_that_is_none_is_one_line():
    @dataclasses.dataclass(frozen=True)
    class Odd(FedAvg):
        kinds = {"x": "vector"}

    with pytest.raises(UserError, match=r"^Odd.kinds: row x is 'vector': expected one of point, difference, "):
        make_federation(Odd(), 1, [])


def test_secret_streams_do_not_repeat_and_are_normal():
    torch.manual_seed(0)
    first = SecretStream().normal(20000)
    torch.manual_seed(0)
    second = SecretStream().normal(20000)
    assert not (first == second).any()
    for values in (first, second):
        assert abs(values.mean()) < 0.05 and abs(values.std() - 1) < 0.05 and abs(values.pow(4).mean() - 3) < 0.4
    uniform = SecretStream().uniform(20000)
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.02


@pytest.mark.parametrize("num", [0, 1, (1 << 15) - 1, 1 << 15, (1 << 15) + 1])  # around what is made at once
def test_secret_bits_are_never_the_same_twice(num):
    stream = SecretStream()
    found = torch.cat([stream.bits(num), stream.bits(num), SecretStream().bits(num)])
    assert found.dtype == torch.int64 and len(found) == 3 * num == len(found.unique())


def test_threads_and_copies_have_secrets_of_their_own():
    stream, found = SecretStream(), []
    threads = [threading.Thread(target=lambda: found.append(stream.bits(100_000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.append(copy.deepcopy(stream).bits(100_000))
    assert len(torch.cat(found).unique()) == 500_000


def test_a_forked_process_has_secrets_of_its_own():
    stream, (reading, writing) = SecretStream(), os.pipe()
    stream.bits(1)
    child = os.fork()
    if child == 0:
        os.write(writing, str(stream.bits(1).item()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reading, 99)) != stream.bits(1).item()


class Total(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        self.total += x.detach().sum()
        return x


def sees_batch_norm(stages, aggregation=None, *layers):
    """A model with batch norm after a join of two steps, and what it began with."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), *layers)
    model[1].register_buffer("mask", torch.full((2,), -math.inf))  # a constant
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sending = {"stages": stages} | ({"aggregation": aggregation} if aggregation else {})
    fed = fedmpi.join(model, algorithm="fedavg", local_steps=1, step_size=0.1, **sending)
    for _ in range(2):
        fed.step(lambda: model(torch.randn(50, 2) + 3).square().mean())
    fed.finish()
    return model.state_dict(), before


def test_stages_see_the_float_buffers_that_change():
    rows = []

    @dataclasses.dataclass(kw_only=True)
    class Back(Stage):
        """Nothing moves."""

        needs_start = True

        def apply(self, sent):
            rows.append({name: row.tolist() for name, row in sent.rows.items()})
            for name, row in sent.rows.items():
                row.copy_(sent.start[name])

    after, before = sees_batch_norm([Back()])
    for name in ("0.weight", "1.weight", "1.running_mean", "1.running_var", "1.mask"):
        assert torch.equal(after[name], before[name]), name
    assert all(0.0 in row["float buffers"] and -math.inf not in row["float buffers"] for row in rows) and len(rows) == 2


def test_a_stage_that_spoils_buffers_is_named():
    class Spoiler(Stage):
        def apply(self, sent):
            sent.rows["float buffers"][0] = math.nan

    with pytest.raises(Diverged, match="in round 1: stage spoiler made values of float buffers of client 0 on rank 0"):
        sees_batch_norm([Spoiler()])


def test_wide_buffers_pass_the_aggregation_or_are_refused():
    lengths = []

    @dataclasses.dataclass(kw_only=True)
    class Hidden(MeanOfSlices):
        exposes_rows = False

        def average(self, out):
            lengths.append((out.dtype, len(out)))
            super().average(out)

    @dataclasses.dataclass(kw_only=True)
    class NoMean(Hidden):
        is_mean = False

    sees_batch_norm([], Hidden(), Total())
    assert (torch.float64, 1) in lengths
    for stages, aggregation, name in (([NormBound()], None, "norm_bound"), ([], NoMean(), "no_?mean")):
        with pytest.raises(UserError, match=f"^buffer '2.total' has float64 .* {name} would not see it"):
            sees_batch_norm(stages, aggregation, Total())


@pytest.mark.parametrize("num_clients", [1, 3])
@pytest.mark.parametrize("algorithm", [FAFED(), MimeAdam()], ids=["fafed", "mimeadam"])
def test_an_aggregation_gets_what_the_round_began_with(algorithm, num_clients):
    """Also in a second exchange of a round, and in memory of its own."""
    seen = []

    @dataclasses.dataclass(kw_only=True)
    class Reader(MeanOfSlices):
        needs_start = True

        def average(self, out):
            seen.append((self.moment, self.start.clone()))
            super().average(out)
            self.start.fill_(7.0)

    oracle = functools.partial(FunctionOracle, lambda client, x, sample: x - client)
    variables = Variables(torch.full((DIM,), 4.0, dtype=torch.float64))
    clients = dict.fromkeys(range(num_clients), oracle)
    federation = Federation(algorithm, SoloLink(), clients, Plan(num_clients, 2), variables, Sending(Reader()))
    federation.start()
    for _ in range(3):
        seen.clear()
        began = {name: row.clone() for name, row in federation.store.averaged_rows().items()}
        federation.run_round()
        assert len(seen) == len(algorithm.exchanges())
        for moment, start in seen:
            kinds = [algorithm.kinds.get(row) for row in moment.rows]
            expected = [began[row] * (kind != "difference") for row, kind in zip(moment.rows, kinds)]
            assert torch.equal(start, torch.cat(expected))


def test_what_a_program_may_give_for_the_sending():
    bound = NormBound(bound=2.0)
    sending = chosen("reproducible", " norm_bound, norm_bound,")
    assert isinstance(sending.aggregation, Reproducible) and [type(one) for one in sending.stages] == [NormBound] * 2
    sending = chosen(Reproducible, (NormBound, bound))
    assert isinstance(sending.aggregation, Reproducible) and sending.stages[1] is bound
    for aggregation, stages, message in [
        (3, (), "aggregation is a int: expected a name, or an object of Aggregation"),
        ("mean", [Reproducible()], "stage is a Reproducible: expected a name, or an object of Stage"),
        ("mean", [object], "stage is a type: expected a name, or an object of Stage"),
        ("mean", bound, "stages is a NormBound: expected a list of names or objects, like ['norm_bound']"),
    ]:
        with pytest.raises(UserError) as error:
            chosen(aggregation, stages)
        assert str(error.value) == message


def test_equal_choices_have_equal_texts():
    """Ranks compare them; a class without fields has no text of its own but its place in memory."""

    class Own(Aggregation):
        def __init__(self, power=1):
            super().__init__()
            self.function = lambda x: x**power

        def average(self, out):
            self.reduce_slices(lambda slices: torch.stack(slices).mean(0), out)

    first, second = (fedmpi.Sending(Own(), [NormBound(bound=0.5)]) for _ in range(2))
    assert first.as_texts() == second.as_texts()
    assert first.as_texts() != fedmpi.Sending(Own(), [NormBound(bound=0.25)]).as_texts()
