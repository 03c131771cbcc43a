"""One spy model through the doors that train: what each pass with gradients saw; what is left of the user's objects.

usage: spy.py FOLDER; on any number of ranks. Prints a line per finding, and "no findings" at the end.
"""

import hashlib
import json
import os
import pathlib
import random
import sys

import numpy as np
import torch
from torch import nn

import fedmpi
from fedmpi.oracles import flat_module

flat_module.LARGE_LAYER = 1  # the fast path of large layers is taken
CLIENTS, ROUNDS = 2, 6
seen, findings = [], []
LOG = os.environ.get("SPY_LOG")  # a file for what each pass saw, of programs in other processes


class Spy(nn.Module):
    """Dropout, batch norm, a pool after a ReLU, tied weights, a frozen part in evaluation mode, a counter, a hook."""

    def __init__(self, shape=None, num_classes=10):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3)
        )
        self.first, self.tied = nn.Linear(27, 27), nn.Linear(27, 27)
        self.tied.weight = self.first.weight
        self.frozen = nn.BatchNorm1d(27).requires_grad_(False).eval()
        self.last, self.calls, self.history = nn.Linear(27, num_classes), 0, []
        self.last.register_forward_hook(hook)

    def forward(self, inputs):
        self.calls += 1
        self.history.append(len(inputs))
        if LOG:
            modes = {name: part.training for name, part in self.named_modules()}
            digest = hashlib.md5(inputs.numpy().tobytes()).hexdigest()
            with open(LOG, "a", encoding="utf-8") as file:
                file.write(json.dumps([torch.is_grad_enabled(), modes, digest]) + "\n")
        if torch.is_grad_enabled():
            modes = tuple(part.training for part in self.modules())
            kinds = tuple((type(p), p.dtype, p.device) for p in self.parameters())
            states = (torch.get_rng_state().numpy(), np.random.get_state()[1], random.getstate())
            batch = inputs.numpy().tobytes()
            seen.append((modes, kinds, *(hashlib.md5(repr(s).encode() if isinstance(s, tuple) else bytes(s)).hexdigest()
                                         for s in (*states, batch))))  # fmt: skip
        hidden = self.frozen(self.tied(torch.relu(self.first(self.net(inputs)))))
        return self.last(hidden)


def hook(part, inputs, outputs):
    return outputs


def facts(module):
    """All that a caller could notice of a module, beside values that a door documents as trained."""
    found = {}
    for name, part in module.named_modules():
        hooks = [len(getattr(part, kind)) for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
        found[name] = (id(part), part.training, "forward" in vars(part), hooks, sorted(vars(part)))
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        found[f"{name} of {type(value).__name__}"] = (id(value), value.requires_grad, value.dtype, value.shape)
    return found


def process():
    """What a door may not change in the process."""
    states = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    return (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), *states)


def expect(is_right, words):
    if not is_right:
        findings.append(words)


def check_modes(door, model):
    """Every part trains in training mode, but for what the user has put into evaluation mode himself."""
    wanted = tuple(not (name == "frozen" or name.startswith("frozen.")) for name, _ in model.named_modules())
    expect(seen, f"{door}: no pass was seen")
    expect(all(entry[0] == wanted for entry in seen), f"{door}: a part was not in its mode: {[e[0] for e in seen][:2]}")


def untouched(door, model, call, documents=()):
    """What a call returns, which changes neither the model, but for what it documents, nor the process."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    before, around, counts = facts(model), process(), (model.calls, list(model.history))
    seen.clear()
    result = call()
    after = facts(model)
    for name, fact in before.items():
        expect(after.get(name) == fact, f"{door}: {name}: {fact} became {after.get(name)}")
    expect(process() == around, f"{door}: the process has other generators, threads or modes")
    if "values" not in documents:
        expect((model.calls, model.history) == counts, f"{door}: passes went through the user's own module")
        same = all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
        expect(same, f"{door}: the user's values changed")
    return result


def train(folder, **settings):
    common = {"data": "digits", "clients": CLIENTS, "batch_size": 20, "local_steps": 2, "threads": 1, "eval_every": 4}
    return fedmpi.train(algorithm="fedavg", out=str(folder), **{**common, "rounds": ROUNDS, **settings})


def trained(folder):
    """fedmpi.train: as a module, class and function; stopped and resumed; baselines."""
    model = Spy()
    whole = untouched("train", model, lambda: train(folder, model=model, name="whole"))
    check_modes("train", model)
    entries = [*seen]
    expect(whole.model is not model, "train: the result is the user's module")
    untouched("train of a function", model, lambda: train(folder, model=lambda: model, name="function", rounds=1))

    untouched("halves", model, lambda: train(folder, model=model, name="halves", rounds=3, checkpoint_every=3))
    first = [*seen]
    again = untouched("resume", model, lambda: train(folder, model=model, resume=str(folder / "halves")))
    check_modes("resume", model)
    steps = 2 * ROUNDS * CLIENTS // whole_ranks()  # of this rank; passes that try the model out come before
    drawn = first[-steps // 2 :] + seen[-steps // 2 :]
    expect(entries[-steps:] == drawn, "resume: a draw saw another mode, noise or batch")
    expect(equal(whole.model, again.model), "resume: other bits")
    compared = {"baselines": "local", "holdout": 0.2, "rounds": 2, "name": "compared"}
    untouched("baselines", model, lambda: train(folder, model=model, **compared))
    check_modes("baselines", model)


def joined(folder):
    """fedmpi.join and fedmpi.average, to the end."""
    inputs = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for door in ("join", "average"):
        torch.manual_seed(1)
        model = Spy()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

        def call(door=door, model=model, optimizer=optimizer):
            if door == "join":
                fed = fedmpi.join(model, "fedavg", local_steps=2, record=folder / door)
            else:
                fed = fedmpi.average(model, optimizer, every=2, record=folder / door)
            for _ in range(4):
                if door == "join":
                    fed.step(lambda: model(inputs).square().mean())
                else:
                    optimizer.zero_grad()
                    model(inputs).square().mean().backward()
                    optimizer.step()
                    fed.step()
            fed.finish()
            state = torch.get_rng_state(), np.random.get_state(), random.getstate()
            return state

        around = process()[:3]
        before, hooks = facts(model), len(model.last._forward_hooks)
        seen.clear()
        call()
        check_modes(door, model)
        expect(facts(model) == before and len(model.last._forward_hooks) == hooks, f"{door}: the module was changed")
        expect(process()[:3] == around, f"{door}: the process was changed")
        storages = [value.untyped_storage().data_ptr() for value in model.state_dict().values() if value.numel()]
        expect(len({*storages}) == len(storages) - 1, f"{door}: tensors share memory, beside the tied weight")


def loaded(folder):
    """fedmpi.load into the user's module: its values, and evaluation mode, which is documented."""
    for name in ("whole", "join"):
        model = Spy()
        parts = [*model.modules()]
        expect(fedmpi.load(folder / name, model) is model and [*model.modules()] == parts, "load: other parts")
        expect(not any(part.training for part in model.modules()), "load: not in evaluation mode")
    other = Spy()
    other.net[2] = nn.Tanh()
    untouched("load of another model", other, lambda: refused(folder, other))


def refused(folder, other):
    try:
        fedmpi.load(folder / "whole", other)
        findings.append("load: another model was taken")
    except fedmpi.UserError as error:
        expect("its part 'net.2' is a Tanh, the run's is a ReLU" in str(error), str(error))


def whole_ranks():
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


def equal(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values())
    return all(torch.equal(a, b) for a, b in pairs)


def main():
    folder = pathlib.Path(sys.argv[1])
    torch.manual_seed(0)
    trained(folder)
    joined(folder)
    loaded(folder)
    print("\n".join(findings) or "no findings", flush=True)


if __name__ == "__main__":
    main()
