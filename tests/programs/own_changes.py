"""Models that change, and their buffers, in a loop of the user's own; see checks.py."""

import contextlib
import copy
import io
import os
import pickle
import tempfile
import threading

import numpy as np
import safetensors.torch
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

import fedmpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
LOWEST = torch.finfo(torch.float32).min
WIDTHS = (8, 500)  # 10,000 parameters: another transport


class Net(nn.Module):
    """Constants of all types, a table that every rank changes, a batch norm and, if `frozen`, a frozen layer."""

    def __init__(self, width, frozen=False, norm=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(20, width), nn.Linear(width, 2)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.first.requires_grad_(not frozen)

    def forward(self, inputs):
        return self.last(torch.tanh(self.norm(self.first(inputs))))


class Loop:
    """Steps of a loop of the user's own by either function."""

    def __init__(self, model, api, every=2, **settings):
        self.model, self.api, self.drawn = model, api, torch.Generator().manual_seed(RANK)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if api == "average":
            self.fed = fedmpi.average(model, self.optimizer, every=every, **settings)
        else:
            self.fed = fedmpi.join(model, "fedavg", local_steps=every, step_size=0.1, **settings)

    def loss(self):
        x = torch.randn(16, 20, generator=self.drawn)
        return functional.cross_entropy(self.model(x), (x[:, RANK % 20] > 0).long())

    def step(self, number=1):
        for _ in range(number):
            if self.api == "join":
                self.fed.step(self.loss)
                continue
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()
            self.fed.step()


def everywhere(tensor):
    return COMM.allgather(tensor.detach().double().reshape(-1).tolist())


def is_equal_everywhere(tensor):
    values = everywhere(tensor)
    return all(one == values[0] for one in values)


def refused(action):
    """The text of the UserError that `action` raises on every rank: on one rank alone, or the same on all."""
    try:
        action()
    except fedmpi.UserError as error:
        texts = {text for text in COMM.allgather(str(error)) if text}
        assert len(texts) == 1, texts
        return texts.pop()
    raise AssertionError("it was not refused")


def check_changes(api, width):
    """What makes other parameters of the model ends with one line that names the first."""

    def unfreeze(model):
        model.first.requires_grad_(True)

    def head(model):
        model.last = nn.Linear(width, 2)

    def layer(model):
        model.more = nn.Linear(2, 2)

    def assign(model):
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)

    def weight_norm(model):
        nn.utils.parametrizations.weight_norm(model.last)

    def double(model):
        model.last.double()

    def buffer(model):
        model.register_buffer("scale", torch.tensor(1.0 + RANK))

    names = {
        unfreeze: "unfreezes 'first.weight'", head: "parameter 'last.weight'", layer: "adds 'more.weight'",
        assign: "parameter 'last.weight'", weight_norm: "adds 'last.parametrizations.weight.original0'",
        double: "gives 'last.weight' the type torch.float64", buffer: "adds 'scale'",
    }  # fmt: skip
    for change, text in names.items():
        loop = Loop(Net(width, frozen=True), api)
        loop.step(2)
        change(loop.model)

        def go_on(loop=loop, change=change):
            if change.__name__ == "double":
                loop.loss = lambda: sum(p.double().square().sum() for p in loop.model.last.parameters())
            loop.step(2)

        found = refused(go_on)
        assert text in found and "call finish(), and then join or average again" in found, found
    loop = Loop(Net(width), api)
    loop.step(2)
    if RANK == SIZE - 1:
        layer(loop.model)  # on one rank alone
    assert "adds 'more.weight'" in refused(lambda: loop.step(2))


def check_values(api, width):
    """Values, storages and buffers that the loop has assigned are taken as they are."""
    loop = Loop(Net(width), api)
    loop.step(2)
    for change in (
        lambda: loop.model.double().float(),
        lambda: setattr(loop.model.last.bias, "data", torch.full((2,), float(RANK))),
        lambda: setattr(loop.model.norm, "running_mean", torch.full((width,), float(RANK))),
    ):
        change()
        own = [loop.model.last.bias.detach().clone(), loop.model.norm.running_mean.clone()]
        loop.optimizer.param_groups[0]["lr"] = 0.0
        if api == "join":
            loop.fed.step_size = 1e-30
        loop.model.eval()
        loop.step(2)
        for mine, value in zip(own, (loop.model.last.bias, loop.model.norm.running_mean)):
            expected = sum(torch.tensor(one) for one in everywhere(mine)) / SIZE
            torch.testing.assert_close(value.detach().double(), expected.double(), rtol=1e-6, atol=1e-7)
            assert is_equal_everywhere(value)
    loop.model.last.bias.data, loop.model.norm.running_mean = torch.full((2,), 7.0), torch.full((width,), 8.0)
    saved = loop.fed.state_dict()
    assert saved["server/buffers"][0] == 8 and (saved["server/x"] == 7).sum() == 2
    loop.fed.finish()
    assert loop.model.last.bias.tolist() == [7.0, 7.0] and (loop.model.norm.running_mean == 8).all()


def check_constants(api, width):
    """Constants of every type keep their bits and are not sent; what changes is sent, in its own type."""
    model = Net(width, norm=False)
    constants = {
        "mask": torch.full((64, 64), -torch.inf).triu(1), "lowest": torch.full((300,), LOWEST),
        "wide": torch.arange(99, dtype=torch.float64) / 7, "halves": (torch.arange(5) / 7).half(),
        "brain": (torch.arange(7) / 7).bfloat16(), "sin": torch.sin(torch.arange(1000.0)),
        "nan": torch.tensor([torch.nan, -0.0]), "whole": torch.arange(5),
        "turns": torch.polar(torch.ones(4), torch.arange(4.0)),
    }  # fmt: skip
    for name, value in constants.items():
        model.register_buffer(name, value.clone(), persistent=name != "sin")
    loop = Loop(model, api, every=1, weight=[100, 37, 11, 5][RANK])
    loop.step(20)
    size = sum(p.numel() for p in model.parameters()) * 4
    accounts = loop.fed.accounts()
    padded = accounts["bytes"] / accounts["round"]
    assert size <= padded < size + 5 * 64, (padded, size)
    sixty = torch.arange(99, dtype=torch.float64) / 7
    with torch.no_grad():
        model.wide.add_(1)  # on all ranks
        model.halves.add_(RANK)
        model.brain = model.brain * (1 + RANK)  # another tensor
    loop.step(1)
    now = loop.fed.accounts()
    assert now["bytes"] - accounts["bytes"] == padded + 99 * 8 + (5 + 7) * 4 * (SIZE > 1), now
    weights = torch.tensor(([100, 37, 11, 5])[:SIZE], dtype=torch.float64)
    grow = (weights * torch.arange(SIZE)).sum() / weights.sum()
    torch.testing.assert_close(model.wide, sixty + 1, rtol=1e-15, atol=0)
    torch.testing.assert_close(model.halves, (constants["halves"].double() + grow).half(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model.brain.double(), constants["brain"].double() * (1 + grow), rtol=1e-2, atol=0)
    loop.fed.finish()
    for name, value in constants.items():
        ours = getattr(model, name)
        assert ours.dtype == value.dtype and is_equal_everywhere(ours.view(torch.uint8 if ours.dim() else ours.dtype))
        if name not in ("wide", "halves", "brain"):
            assert ours.contiguous().view(torch.uint8).equal(value.contiguous().view(torch.uint8)), name


def check_start(api, width):
    """Buffers that differ at the start are an error, taken from rank 0, averaged, or private."""

    def make():
        model = Net(width)
        model.register_buffer("same", torch.full((3,), LOWEST))
        model.register_buffer("mean", torch.tensor([1.0, 2.0 + RANK]))
        model.register_buffer("number", torch.tensor(400 + RANK))
        return model

    found = refused(lambda: Loop(make(), api))
    assert "buffer 'mean' is" in found and 'buffers="rank0"' in found, found
    weights = [1, 3, 4, 8][:SIZE]  # whose sums are powers of two
    mean = 2.0 + sum(rank * weight for rank, weight in enumerate(weights)) / sum(weights)
    for how, value, number in (("rank0", 2.0, 400), ("average", mean, 400 + RANK)):
        model = make()
        loop = Loop(model, api, buffers=how, weight=weights[RANK])
        assert model.mean.tolist() == [1.0, value] and int(model.number) == number, how
        loop.step(2)
        loop.fed.finish()
        assert torch.equal(model.same, torch.full((3,), LOWEST)) and model.mean.tolist() == [1.0, value]
    model = make()
    model.last.bias.data.fill_(RANK)
    loop = Loop(model, api, private="mean,number,last.bias,bn")
    assert model.mean[1] == 2.0 + RANK and model.last.bias.tolist() == [RANK, RANK]
    for number in range(5):
        loop.step(1)
        assert is_equal_everywhere(model.first.weight) == (number % 2 == 1)
        assert not is_equal_everywhere(model.last.bias) and not is_equal_everywhere(model.norm.running_mean)
    assert abs(model.last.bias.mean().item() - RANK) < 0.2
    loop.fed.finish()
    assert model.mean[1] == 2.0 + RANK and abs(model.last.bias.mean().item() - RANK) < 0.2
    model = Net(width)
    shapes = [(2,), (3,)] if RANK == 0 else [(3,), (2,)]
    for name, shape in zip("ab", shapes):
        model.register_buffer(name, torch.zeros(shape))
    assert "buffer 'a' is [2]" in refused(lambda: Loop(model, api, buffers="rank0"))


def check_private_alone(api, width):
    """With everything private but one bias, each rank trains as it would alone, if that bias stays."""
    results = []
    for private in (None, "first,norm,last.weight"):
        loop = Loop(Net(width), api, comm=MPI.COMM_SELF if private is None else None, private=private)
        loop.model.last.bias.register_hook(torch.zeros_like)
        loop.step(5)
        loop.fed.finish()
        results.append([loop.model.first.weight, loop.model.norm.running_var])
    for pair in zip(*results):  # the shared bias is a mean, which rounds
        torch.testing.assert_close(*pair)


def check_finite(api, width):
    """Statistics that are not finite on one rank end all, with the buffer's and the client's name."""
    loop = Loop(Net(width), api)
    loop.step(2)
    loop.model.eval()
    if RANK == SIZE - 1:
        loop.model.norm.running_var[3] = torch.inf
    try:
        loop.step(2)
    except fedmpi.ground.errors.Diverged as error:
        assert f"buffer 'norm.running_var' of client {SIZE - 1} on rank {SIZE - 1}" in str(error), error
    else:
        raise AssertionError("it was not noticed")


def check_kinds(api, width):
    """Models of several or complex types are refused before anything is converted."""
    for name, dtype in (("last", torch.float64), ("first", torch.complex64)):
        model = Net(width)
        getattr(model, name).to(dtype)
        assert str(dtype) in refused(lambda model=model: Loop(model, api))
        assert getattr(model, name).weight.dtype == dtype
    if api == "average":
        model, before = Net(width).double(), torch.arange(9.0).float() / 7  # float32 in a float64 model
        model.register_buffer("table", before.clone())
        fed = fedmpi.average(model, every=1)
        for _ in range(3):
            model.table += 1
            fed.step()
        fed.finish()
        assert torch.equal(model.table, before + 1 + 1 + 1)


def check_set_model(api, width):
    """Other values for all ranks; an outer optimizer goes on as if they had come by its own steps."""
    settings = {"outer": "nesterov"} if api == "average" else {}
    loop, other = Loop(Net(width), api, **settings), Net(width)
    with torch.no_grad():
        for value in other.parameters():
            value.add_(1)
        other.norm.running_mean.fill_(5)
    loop.step(4)
    rows = loop.fed.federation.server.rows
    moments = {name: row.clone() for name, row in rows.items() if not name.startswith("x")}
    if RANK == 1:
        other.last.bias.data.zero_()  # rank 0's count
    state = loop.fed.accounts()
    loop.fed.set_model(other.state_dict())
    assert loop.fed.accounts() == state
    assert is_equal_everywhere(loop.model.last.bias) and loop.model.norm.running_mean[0] == 5
    assert RANK == 1 or torch.equal(loop.model.last.bias, other.last.bias)
    assert all(torch.equal(rows[name], row) for name, row in moments.items())
    for name, row in rows.items():
        assert not name.startswith("x") or torch.equal(row, rows["x"]), name
    for wrong in ({"nothing": torch.ones(1)}, {"last.bias": 3.0}, {"last.bias": torch.ones(7)}):
        assert f"'{min(wrong)}' is a" in refused(lambda wrong=wrong: loop.fed.set_model(wrong))
    assert "state is a NoneType" in refused(lambda: loop.fed.set_model(None))
    loop.step(1)
    assert "a round has begun" in refused(lambda: loop.fed.set_model(other.state_dict()))
    loop.step(1)
    loop.fed.finish()


def check_optimizer(api, width):
    """The moments of an optimizer that the loop makes anew are averaged from then on."""
    model = Net(width, norm=False)
    optimizer = torch.optim.Adam(model.parameters())
    fed = fedmpi.average(model, optimizer, every=2, exchange="exp_avg")
    for number in range(8):
        if number == 4:
            optimizer = torch.optim.Adam(model.parameters())
        model.zero_grad()
        (model(torch.full((4, 20), 1.0 + RANK)) ** 2).sum().backward()
        optimizer.step()
        fed.step()
        assert is_equal_everywhere(optimizer.state[model.last.weight]["exp_avg"]) == fed.averaged, number
    fed.finish()


def check_resume(api, width):
    """Saved in the middle of the round in which a buffer changes for the first time."""
    final = []
    for stop in (None, 1, 2, 3):
        model, drawn = Net(width), np.random.default_rng(RANK).random(6)
        model.register_buffer("late", torch.zeros(3))
        model.register_buffer("never", torch.full((2,), LOWEST))
        loop = Loop(model, api, every=3)
        for number in range(6):
            if number == stop:
                saved = {name: v.clone() for name, v in model.state_dict().items()}, loop.fed.state_dict(), loop.drawn
                loop.fed.finish()
                model = Net(width)
                model.register_buffer("late", torch.zeros(3))
                model.register_buffer("never", torch.full((2,), LOWEST))
                loop = Loop(model, api, every=3)
                model.load_state_dict(saved[0])
                loop.fed.load_state_dict(saved[1])
                loop.drawn = saved[2]
            if number == 1:
                model.late += drawn[0]
            loop.step(1)
        loop.fed.finish()
        final.append(model.state_dict())
    for other in final[1:]:
        assert all(torch.equal(other[name], value) for name, value in final[0].items())
    assert is_equal_everywhere(final[0]["late"]) and final[0]["late"][0] > 0


def check_end(api, width):
    """What one rank changes after the last average is found by `finish`."""

    def head(model):
        model.last = nn.Linear(width, 2)

    def frozen(model):
        model.first.bias.data += 1

    def table(model):  # beside a mask whose values are as large as can be
        model.norm.running_mean += 0.1

    def order(model):  # the same values at other places
        model.norm.running_mean.copy_(model.norm.running_mean.flip(0))

    names = {
        head: "parameter 'last.weight'", frozen: "parameter 'first.bias'", table: "buffer 'norm.running_mean'",
        order: "buffer 'norm.running_mean'",
    }  # fmt: skip
    for change, text in names.items():
        model = Net(width, frozen=True)
        model.register_buffer("mask", torch.full((3,), LOWEST))
        loop = Loop(model, api)
        loop.step(2)
        if RANK == SIZE - 1:
            change(model)
        if SIZE > 1:
            assert text in refused(loop.fed.finish), change


def check_ended(api, width):
    """After `finish` nothing of the federation can be called that would move the model."""
    loop = Loop(Net(width), api)
    loop.step(2)
    state, values = loop.fed.state_dict(), loop.model.state_dict()
    loop.fed.finish()
    for call in (
        lambda: loop.fed.set_model(values),
        lambda: loop.fed.load_state_dict(state),
        lambda: next(loop.fed.batches([1])),
    ):
        assert "finish() was called" in refused(call)


def check_moved(api, width):
    """Memory that torch has moved away from the other ranks is noticed at the next average."""
    loop = Loop(Net(width), api)
    loop.step(2)
    loop.model.share_memory()
    assert "was moved by share_memory()" in refused(lambda: loop.step(2))


def check_saved(api, width):
    """Whatever writes or copies the model at any step takes the model alone, with the values of then."""
    model = Net(width)
    model.norm.register_buffer("again", model.norm.running_mean)
    model.register_buffer("brain", torch.ones(3).bfloat16())
    model.register_buffer("tiny", torch.ones(5).to(torch.float8_e4m3fn))
    loop = Loop(model, api, every=3)

    def written(value):
        file = io.BytesIO()
        torch.save(value, file)
        return file

    bare = len(written(Net(width).state_dict()).getvalue())
    for number in range(5):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        file = written(model.state_dict())
        assert len(file.getvalue()) < bare + 2000, (number, len(file.getvalue()), bare)
        assert len(written(model.last.state_dict()).getvalue()) < 4 * model.last.weight.numel() + 4000
        text = pickle.dumps(model.first)  # of float8, torch cannot read what pickle wrote
        assert torch.equal(pickle.loads(text).weight, model.first.weight) and len(text) < 4 * 21 * width + 4000
        file.seek(0)
        found = [torch.load(file), copy.deepcopy(model).state_dict()]
        path = f"{tempfile.gettempdir()}/saved-{os.getpid()}.safetensors"
        safetensors.torch.save_model(model, path)
        loaded = Net(width)
        missing, _ = safetensors.torch.load_model(loaded, path, strict=False)
        assert missing <= {"norm.running_mean"} and torch.equal(loaded.last.weight, model.last.weight)
        del model.norm._buffers["again"]
        safetensors.torch.save_file(model.state_dict(), path)
        model.norm._buffers["again"] = model.norm.running_mean
        found.append({**safetensors.torch.load_file(path), "norm.again": model.norm.running_mean})
        for other in found:
            assert all(torch.equal(other[name].double(), value.double()) for name, value in state.items()), number
        os.unlink(path)
        if number == 4:
            loop.fed.finish()
        elif number < 3:
            loop.step(2)


def check_private_resume(api, width):
    """A state that is saved in the middle of a round has the private values of that step."""
    final = []
    for stop in (None, 1, 3, 4):
        loop = Loop(Net(width), api, every=3, private="norm,last")
        for number in range(6):
            if number == stop:
                saved = {n: v.clone() for n, v in loop.model.state_dict().items()}, loop.fed.state_dict(), loop.drawn
                loop.fed.finish()
                loop = Loop(Net(width), api, every=3, private="norm,last")
                loop.model.load_state_dict(saved[0])
                loop.fed.load_state_dict(saved[1])
                loop.drawn = saved[2]
            loop.step(1)
        loop.fed.finish()
        final.append(loop.model.state_dict())
    for other in final[1:]:
        assert all(torch.equal(other[name], value) for name, value in final[0].items())


class Averaging(Net):
    """Changes a buffer after autograd has saved another one."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("ema", torch.zeros(width))
        self.register_buffer("table", torch.ones(11).half())

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs))
        self.ema.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return self.last(torch.tanh(hidden))


def check_plain(api, width):
    """Buffers may change in place between a forward and a backward pass, and torch.save writes all of them."""
    loop = Loop(Averaging(width), api)
    loop.step(2)
    file = io.BytesIO()
    torch.save(loop.model.state_dict(), file)
    file.seek(0)
    for name, value in torch.load(file).items():
        assert torch.equal(value, loop.model.state_dict()[name]), name
    loop.model.table += 1
    loop.step(2)
    assert loop.model.table.dtype == torch.float16 and (loop.model.table == 2).all()
    loop.fed.finish()
    assert is_equal_everywhere(loop.model.ema) and (loop.model.table == 2).all()


def check_large(api, width):
    """A mask that all ranks change keeps its lowest values: their sum is finite."""
    model = Net(width)
    for name, dtype in {"mask": torch.float32, "brain": torch.bfloat16}.items():
        model.register_buffer(name, torch.full((9,), torch.finfo(dtype).min, dtype=dtype))
    loop = Loop(model, api, weight=100 + 7 * RANK)
    for number in range(3):
        for mask in (model.mask, model.brain):
            mask[number] = 4.0
        loop.step(2)
        for mask in (model.mask, model.brain):
            assert mask.tolist() == [4.0] * (number + 1) + [torch.finfo(mask.dtype).min] * (8 - number), mask
    loop.fed.finish()


def check_two_names(api, width):
    """A module may have one buffer under two names."""
    model = Net(width)
    model.norm.register_buffer("again", model.norm.running_mean)
    loop = Loop(model, api)
    loop.step(3)
    for _ in range(2):
        assert torch.equal(model.norm.again, model.norm.running_mean) and model.norm.again.any()
        loop.fed.finish()


def check_integers(api, width):
    """Integer buffers that the ranks have changed in different ways are named at the end."""
    for private in (None, "seen,last"):
        model = Net(width)
        model.register_buffer("seen", torch.tensor(0))
        loop = Loop(model, api, private=private)
        loop.step(2)
        model.seen += RANK
        with contextlib.redirect_stderr(io.StringIO()) as lines:
            loop.fed.finish()
        expected = "fedmpi: buffer 'seen' is 0 on rank 0, 1 on rank 1"
        is_said = lines.getvalue().startswith(expected) and lines.getvalue().count("\n") == 1
        assert is_said if RANK == 0 < SIZE - 1 and private is None else not lines.getvalue(), lines.getvalue()


def check_dropped(api, width):
    """Loops that are dropped without `finish` leave no threads."""
    for _ in range(3):
        Loop(Net(width), api).step(2)
    assert sum(thread.name == "timeout" for thread in threading.enumerate()) <= 1, threading.enumerate()


def check_exit(api, width):
    """Nobody catches the error."""
    loop = Loop(Net(width), api)
    loop.model.more = nn.Linear(2, 2)
    loop.step(2)
