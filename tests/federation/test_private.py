"""Private coordinates: what is private differs between clients and nothing else; each client is alone with them."""

import functools

import pytest
import torch

import fedmpi.algorithms
from fedmpi.aggregation.sending import Sending
from fedmpi.aggregation.stages.norm_bound import NormBound
from fedmpi.algorithms import FedDyn
from fedmpi.algorithms.base import Algorithm
from fedmpi.comm.solo import SoloLink
from fedmpi.federation import Plan, Variables
from fedmpi.federation.rounds import Federation
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import known
from fedmpi.oracles import FunctionOracle
from fedmpi.oracles.flat_module import BufferPart

DIM, CENTRES, PRIVATE = 6, (1.0, -2.0, 4.0), (slice(0, 2),)
START = torch.linspace(0, 1, DIM, dtype=torch.float64)
ALGORITHMS = known(fedmpi.algorithms, Algorithm)
# The one client that moves alone is drawn among all of them, so that others stand still.
DRAWN = {"ce_lsgd"}
COUPLED = {"fedexp"}  # the server's step depends on norms of all coordinates
BY_THE_CLOCK = {"fedadamw"}  # its corrections count the steps by the clock that all clients share
SETTINGS = {"coda": {"stage_rounds": 100}, "codasca": {"stage_rounds": 100}}


def run(name, centres, private=(), participants=None, steps=3):
    """A federation after four rounds on f_i = ½ ‖x - c_i‖², with a client for each of the centres c_i."""
    cls = ALGORITHMS[name]
    oracles = dict.fromkeys(range(len(centres)), functools.partial(FunctionOracle, lambda i, x, sample: x - centres[i]))
    ascent = slice(DIM - 1, DIM) if "dual_step_size" in cls.__dataclass_fields__ else None
    variables = Variables(START, None, [slice(0, 2), slice(2, DIM)], ascent, private)
    algorithm, plan = cls(step_size=0.05, **SETTINGS.get(name, {})), Plan(len(centres), steps, participants)
    federation = Federation(algorithm, SoloLink(), oracles, plan, variables)
    federation.start()
    for _ in range(4):
        federation.run_round()
    return federation


def model(federation, client):
    return federation.private.model(federation.clients[client], federation.server.x, federation.store.buffers)[0]


def gradient_oracle_is_enough(name):
    return getattr(ALGORITHMS[name], "oracle", None) is None


ALONE = [name for name in ALGORITHMS if name not in DRAWN and gradient_oracle_is_enough(name)]


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("present", [[0, 1, 2], [0, 1]])
def test_a_client_is_alone_with_its_private_coordinates(name, present):
    """f_i has no terms across coordinates: private ones move as in a federation of this client alone."""
    federation = run(name, CENTRES, PRIVATE, participants=lambda index: present)
    for client, centre in enumerate(CENTRES[: len(present)]):
        alone = run(name, [centre]).server.x
        assert torch.allclose(model(federation, client)[:2], alone[:2], rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("name", [name for name in ALONE if name not in BY_THE_CLOCK])
def test_it_is_alone_also_if_the_others_make_more_steps(name):
    """What the server divides by is then the client's own number of steps, and numbers are the client's own."""
    federation = run(name, CENTRES, PRIVATE, steps=[2, 5, 3].__getitem__)
    for client, centre in enumerate(CENTRES):
        alone = run(name, [centre], steps=[2, 5, 3][client]).server.x
        assert torch.allclose(model(federation, client)[:2], alone[:2], rtol=1e-9, atol=1e-12), client


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if gradient_oracle_is_enough(name)])
def test_what_is_private_differs_between_clients_and_nothing_else(name):
    federation, shared = run(name, CENTRES, PRIVATE), run(name, CENTRES)
    models = torch.stack([model(federation, client) for client in range(3)])
    assert torch.equal(models[:, 2:], models[:1, 2:].expand(3, DIM - 2))
    if name not in DRAWN:
        assert (models[:, :2].std(0) > 1e-3).all()
    if name not in COUPLED:
        assert torch.allclose(federation.server.x[2:], shared.server.x[2:])  # as without private ones
    assert torch.equal(federation.server.x[:2], START[:2]), "the server has no private values"


def test_what_stages_see_of_a_move_is_0_at_private_coordinates():
    """Where the model begins with values that are not 0, a bound on the norm would be used up by them."""
    start, private, sending = START + 1, PRIVATE, Sending(stages=[NormBound(bound=0.5)])
    variables = Variables(start, None, [slice(0, 2), slice(2, DIM)], None, private)
    found = []
    for given in (variables, Variables(start[2:])):
        oracles = dict.fromkeys(range(2), functools.partial(FunctionOracle, lambda i, x, sample: x - i))
        federation = Federation(FedDyn(), SoloLink(), oracles, Plan(2, 3), given, sending)
        federation.start()
        federation.run_round()
        found.append(federation.server.x[-4:])
    assert torch.allclose(*found)


def test_an_absent_client_keeps_what_it_has():
    federation = run("fedavg", CENTRES, PRIVATE, participants=lambda index: [0, 1])
    assert torch.equal(model(federation, 2)[:2], START[:2])
    assert not torch.equal(model(federation, 0)[:2], START[:2])


class Counting(FunctionOracle):
    """Every gradient adds 1 plus the client's number to its two buffers."""

    def __init__(self, client):
        super().__init__(lambda i, x, sample: x - CENTRES[i], client)

    def gradient(self, z, xi):
        self.client.buffers += 1 + self.client.index
        return super().gradient(z, xi)


def test_private_buffers_are_those_of_the_local_steps():
    """As of buffers that are averaged, the gradients before the first round do not count; the server has none."""
    begin = torch.tensor([10.0, 20.0], dtype=torch.float64)
    parts = [BufferPart(name, place, 1, torch.float64) for place, name in enumerate(("shared", "own"))]
    variables = Variables(START, begin, private_buffers=(slice(1, 2),), buffer_parts=parts)
    algorithm = ALGORITHMS["scaffold_m"](step_size=0.05)  # with a gradient before the first round
    federation = Federation(algorithm, SoloLink(), dict.fromkeys(range(2), Counting), Plan(2, 3), variables)
    federation.start()
    for rounds in range(3):
        models = [federation.private.model(client, START, federation.store.buffers)[1] for client in federation.clients]
        assert [own[1].item() for own in models] == [20 + 3 * rounds, 20 + 6 * rounds]
        assert federation.store.buffers.tolist() == [10 + 4.5 * rounds, 20]
        federation.run_round()


def test_patterns_of_names():
    from torch import nn

    from fedmpi.federation.frozen import freeze
    from fedmpi.federation.private import matching

    net = nn.Sequential()
    net.add_module("conv", nn.Conv2d(1, 2, 3))
    net.add_module("norm", nn.BatchNorm2d(2))
    net.add_module("head", nn.Linear(2, 2))
    assert matching(net, "bn", "private") == {name for name in net.state_dict() if name.startswith("norm.")}
    assert matching(net, "head", "private") == matching(net, "head.*", "private") == {"head.weight", "head.bias"}
    assert matching(net, "*.bias", "private") == {"conv.bias", "norm.bias", "head.bias"}
    with pytest.raises(UserError, match="private = heat: no layer is called heat"):
        matching(net, "heat", "private")
    freeze(net, "conv,bn")
    assert [name for name, p in net.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]
    with pytest.raises(UserError, match="nothing to train"):
        freeze(net, "*")
