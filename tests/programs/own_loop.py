"""What must hold of `fedmpi.join`, on every rank; see checks.py."""

import copy
import io
import types

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

import fedmpi
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.ground.streams import FIRST, WHOLE
from fedmpi.training.build import prepare
from fedmpi.training.config import read_command_line

RANK = MPI.COMM_WORLD.rank
RULES = ("fafed", "fedavg", "scaffold", "mimeadam", "local_amsgrad", "mb_storm", "fedadam", "fed_lamb")


def run_of(rule, more=""):
    """The job of a short run of three rounds of four steps, ready to start."""
    words = f"--algorithm {rule} --model mlp --rounds 3 --local-steps 4 --batch-size 8 --first-batch-size 24 {more}"
    return prepare(read_command_line(words.split()), MPILink())


def check_train():
    """On the same batches, join learns the same bits as fedmpi.train."""
    for rule in RULES:
        job = run_of(rule)
        module = copy.deepcopy(job.flat.module)
        job.federation.start()
        for _ in range(3):
            job.federation.run_round()

        def closure(number, module=module, job=job):
            sampler = job.federation.clients[0].oracle._objective.sampler
            return lambda: job.task.loss(module, job.task.batch(RANK, sampler(number)))

        fed = fedmpi.join(module, rule, local_steps=4)
        fed.whole = closure(WHOLE)
        fed.start(closure(FIRST))
        for number in range(12):
            fed.step(closure(number))
            assert fed.averaged == (number % 4 == 3)
        assert torch.equal(fed.federation.server.x, job.federation.server.x), rule
        assert fed.accounts()["bytes"] == job.link.traffic.nbytes, rule
        assert fed.accounts()["gradients"] == job.federation.num_gradients, rule
        expected = job.flat.named_values(job.federation.server.x, job.federation.store.buffers)
        fed.finish()
        assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items()), rule


def check_participation():
    """With half of the ranks in a round, drawn as by fedmpi.train, also with layers of its own: the same bits."""
    for rule, private in [*((rule, None) for rule in RULES), ("fafed", "*.bias"), ("fedadam", "*.bias")]:
        job = run_of(rule, "--participation 0.5 --seed 3" + (f" --private {private}" if private else ""))
        module = copy.deepcopy(job.flat.module)
        job.federation.start()
        for _ in range(5):
            job.federation.run_round()
        sampler = job.federation.clients[0].oracle._objective.sampler

        def closure(number, module=module, job=job, sampler=sampler):
            return lambda: job.task.loss(module, job.task.batch(RANK, sampler(number)))

        fed = fedmpi.join(module, rule, local_steps=4, participation=0.5, seed=3, private=private)
        fed.whole = closure(WHOLE)
        fed.start(closure(FIRST))
        made = 0
        for _ in range(20):
            works = fed.takes_part
            loss = fed.step(closure(made))
            assert loss.isnan() != works
            made += works
        assert made % 4 == 0 and MPI.COMM_WORLD.allreduce(made) == 20 * MPI.COMM_WORLD.size // 2
        (client,), expected = job.federation.clients, job.federation.server.x
        if private:
            expected, _ = job.federation.private.model(client, expected, job.federation.store.buffers)
        assert torch.equal(fed._current(), expected), (rule, private)
        assert fed.accounts()["bytes"] == job.link.traffic.nbytes, rule
        assert fed.accounts()["gradients"] == job.federation.num_gradients, rule
        fed.finish()


def check_absent():
    """`average` with half of the ranks: steps that the others make are lost; a last, shorter round is averaged, too."""
    results = []
    for makes_all in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fed = fedmpi.average(model, optimizer, every=3, outer="nesterov", participation=0.5, seed=1, private="0")
        by_hand, drawn = torch.Generator().manual_seed(RANK), []
        for number in range(11):
            drawn.append(fed.takes_part)
            assert number % 3 == 0 or drawn[-1] == drawn[-2]
            x = torch.randn(8, 4, generator=by_hand)
            if fed.takes_part or makes_all:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
            fed.step(loss if fed.takes_part else float("nan"))
        together = torch.tensor(MPI.COMM_WORLD.allgather(drawn))
        assert (together.sum(0) == MPI.COMM_WORLD.size // 2).all() and together.any(1).all()
        fed.finish()
        results.append({name: value.clone() for name, value in model.state_dict().items()})
    differ = [name for name, value in results[0].items() if not torch.equal(value, results[1][name])]
    assert all("num_batches" in name for name in differ), differ


class Tied(nn.Module):
    """A small language model as Hugging Face's: tied weights, a frozen table, batches and outputs by name."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(11, 6), nn.Embedding(4, 6)
        self.body, self.norm, self.head = nn.Linear(24, 6), nn.BatchNorm1d(6), nn.Linear(6, 11, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.head.weight = self.words.weight
        self.places.requires_grad_(False)

    def forward(self, input_ids, labels):
        hidden = (self.words(input_ids) + self.places.weight).flatten(1)
        hidden = self.dropout(self.norm(self.body(hidden)))
        return types.SimpleNamespace(loss=functional.cross_entropy(self.head(hidden), labels))


def batches(number, seed=0):
    """`number` batches of this rank."""
    drawn = torch.Generator().manual_seed(100 * seed + RANK)
    for _ in range(number):
        ids = torch.randint(11, (8, 5), generator=drawn)
        yield {"input_ids": ids[:, :4], "labels": ids[:, 4]}


def tied_model(seed=0):
    torch.manual_seed(seed)
    return Tied()


def check_model():
    """Tied weights, dict batches, output objects, frozen and compiled modules; all ranks end with the same model."""
    results = []
    for wrap in (lambda module: module, lambda module: torch.compile(module, backend="eager")):
        module = tied_model()
        places = module.places.weight.clone()
        if RANK == 1:
            module.body.weight.data.zero_()  # rank 0's values are taken
        model = wrap(module)
        torch.manual_seed(RANK)
        fed = fedmpi.join(model, fedmpi.algorithms.FAFED(step_size=0.01), local_steps=3)
        for batch in batches(7):
            fed.step(lambda model=model, batch=batch: model(**batch))
        assert not fed.averaged
        fed.finish()
        assert module.head.weight is module.words.weight and torch.equal(module.places.weight, places)
        assert int(module.norm.num_batches_tracked) == 8, "7 steps and the start: not once for each gradient"
        weights = torch.cat([p.detach().reshape(-1) for p in module.state_dict().values()]).double()
        everywhere = MPI.COMM_WORLD.allgather(weights.tolist())
        assert everywhere[0] == everywhere[1]
        results.append(weights)
    assert torch.equal(*results)


def check_backward():
    """A closure may accumulate micro-batches by backward, and compute under autocast."""
    results = []
    for own in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        fed = fedmpi.join(model, "fedavg", local_steps=2, step_size=0.5)
        data = torch.Generator().manual_seed(RANK)
        for _ in range(4):
            x = torch.randn(8, 4, generator=data)

            def closure(own=own, model=model, x=x):
                if not own:
                    return (model(x[:4]).square().mean() + model(x[4:]).square().mean()) / 2
                total = 0
                for part in x.split(4):
                    loss = model(part).square().mean() / 2
                    loss.backward()
                    total += loss.detach()
                return total

            fed.step(closure)
        fed.finish()
        results.append(model[0].weight.detach())
    torch.testing.assert_close(*results)
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    fed = fedmpi.join(model, "stem", local_steps=2, step_size=0.1, clip_norm=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            fed.step(lambda: model(torch.ones(2, 64)).float().square().mean())
    fed.finish()
    assert model.weight.dtype == torch.float32


def check_resume():
    """state_dict in the middle of a round; the same bits as an unbroken loop, dropout included."""
    for rule, share in (("fafed", 1.0), ("fed_lamb", 1.0), ("mb_storm", 1.0), ("fafed", 0.5)):
        final = []
        for stop in (None, 5):
            model = tied_model()
            fed = fedmpi.join(model, rule, local_steps=3, participation=share)
            torch.manual_seed(RANK)
            for number, batch in enumerate(batches(9)):
                if number == stop:
                    file = io.BytesIO()
                    torch.save((fed.state_dict(), torch.get_rng_state()), file)
                    file.seek(0)
                    fed.finish()
                    model = tied_model(7)
                    model.places.weight.data.copy_(tied_model().places.weight)
                    fed = fedmpi.join(model, rule, local_steps=3, participation=share)
                    state, noise = torch.load(file, weights_only=True)
                    fed.load_state_dict(state)
                    torch.set_rng_state(noise)
                fed.step(lambda model=model, batch=batch: model(**batch))
            final.append(fed.federation.server.x.clone())
            fed.finish()
        assert torch.equal(*final), rule


def check_communicator():
    """Each communicator is a federation of its own; its ranks' loaders may differ in length, and weights count."""
    alone = MPI.COMM_WORLD.Split(RANK)
    model = nn.Linear(1, 1, bias=False)
    fed = fedmpi.join(model, "fedavg", comm=alone, local_steps=1, step_size=1.0)
    model.weight.data.fill_(2.0)
    fed.step(lambda: RANK * model.weight.sum())
    assert model.weight.item() == 2.0 - RANK
    fed.finish()
    fed = fedmpi.join(model, "fedavg", local_steps=2, step_size=1.0, weight=1 + 2 * RANK)
    steps = 0
    model.weight.data.fill_(0.0)
    for number in fed.batches(range(3 + 2 * RANK)):
        fed.step(lambda number=number: -number * model.weight.sum())
        steps += 1
    fed.finish()
    assert steps == 5
    # rank 0 walks 0, 1, 2, 0, 1 and rank 1 walks 0, 1, 2, 3, 4, with weights 1 and 3
    assert model.weight.item() == (1 + 3 * 1) / 4 + (2 + 3 * 5) / 4 + (1 + 3 * 4) / 4, model.weight
    alone.Free()


def check_uneven():
    """Ranks that make different numbers of steps get an error."""
    model = nn.Linear(1, 1)
    fed = fedmpi.join(model, "fedavg", local_steps=1)
    for _ in range(2 + RANK):
        fed.step(lambda: model(torch.ones(1, 1)).sum())
    fed.finish()


def check_error():
    """An error on one rank ends all."""
    model = nn.Linear(1, 1)
    fed = fedmpi.join(model, "fedavg", local_steps=2)
    for number in range(10):
        if RANK == number == 1:
            raise ValueError("there is no such batch")
        fed.step(lambda: model(torch.ones(1, 1)).sum())


def check_schedule():
    """Ranks with other step sizes at an average get an error."""
    model = nn.Linear(1, 1)
    fed = fedmpi.join(model, "fedavg", local_steps=1, step_size=0.1)
    for step_size in (0.1, 0.2, 0.2 + 1e-9 * RANK):
        fed.step_size = step_size
        fed.step(lambda: model.weight.square().sum())


def check_different():
    """Ranks with different models get an error."""
    fedmpi.join(nn.Linear(1, 1 + RANK))


def check_caught():
    """A program that catches an error has its text on every rank."""
    for wrong, why in (
        ({"weight": 1 - RANK}, "on rank 1: weight = 0"),
        ({"local_steps": 1 + RANK}, "local_steps is 1"),
    ):
        try:
            fedmpi.join(nn.Linear(1, 1), "fedavg", **wrong)
        except fedmpi.UserError as error:
            assert why in str(error), error
        else:
            raise AssertionError("there was no error")
