"""Ranks with other modules: python code_differs.py FOLDER [CASES]; writes what each got into FOLDER/found*.json."""

import importlib
import json
import os
import pathlib
import sys

import torch
from mpi4py import MPI
from torch import nn

import fedmpi

RANK, LAST = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size - 1
FOLDER = pathlib.Path(sys.argv[1])
os.chdir(FOLDER)
FIRST_LINES = "import dataclasses, enum, functools, torch, fedmpi\nfrom torch import nn\n"
HELPERS = "import torch\nRATE = 0.5\ndef act(x):\n    return torch.tanh(x)\n"
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 2)
    def forward(self, x):
        return torch.tanh(self.layer(x))
"""
NET_OF = NET.replace("return torch.tanh(self.layer(x))", "return {}").replace("class Net(nn.Module)", "{}class Net({})")
TASK = """
class Task(fedmpi.Task):
    sign = 1
    model = nn.Linear
    def train(self, client, num_clients):
        return torch.utils.data.TensorDataset(torch.ones(8, 12), torch.zeros(8, dtype=torch.long))
    def loss(self, model, batch):
        return self.scaled(nn.functional.cross_entropy(model(batch[0]), batch[1]))
    def scaled(self, value):
        return self.sign * value
def score(outputs, targets):
    return float((outputs.argmax(1) == targets).float().mean())
Task.metrics = {"score": score}
Task.model = Net
"""
ALGORITHM = """
@dataclasses.dataclass(frozen=True)
class Mine(fedmpi.algorithms.FedAvg):
    name = "mine"
    def server_step(self, server):
        super().server_step(server)
        server.x.mul_(1.0)
"""
STAGE = """
from fedmpi.aggregation.stages.base import Stage
from fedmpi.aggregation.mean import Mean
@dataclasses.dataclass(kw_only=True)
class Bound(Stage):
    def apply(self, sent):
        sent.weight * 1.0
@dataclasses.dataclass(kw_only=True)
class Whole(Mean):
    def facts(self):
        return {"whole": 1.0}
"""
SPLIT = """
from fedmpi.data.partitions.even import Even
@dataclasses.dataclass(frozen=True)
class Split(Even):
    def split(self, *arguments):
        return super().split(*arguments)
"""
ORACLE = """
from fedmpi.oracles.autograd_kind import Autograd
class Careful(Autograd):
    def gradient(self, *arguments):
        return super().gradient(*arguments)
"""


def net(forward="torch.tanh(self.layer(x))", before="", base="nn.Module", decorator=""):
    return before + NET_OF.format(decorator, base, forward)


def joined(module):
    fedmpi.join(module.Net(), "fedavg", local_steps=2, step_size=0.1)


def averaged(module):
    fedmpi.average(module.Net())


def of_data(module=None, **settings):
    data = [torch.utils.data.TensorDataset(torch.ones(8, 12), torch.zeros(8, dtype=torch.long))] * (LAST + 1)
    model = module.Net if hasattr(module, "Net") else nn.Linear(12, 2)
    common = {"algorithm": "fedavg", "rounds": 1, "threads": 1, "name": f"run{len(DONE)}", "model": model, "data": data}
    return fedmpi.train(**{**common, **settings})


def of_file(**settings):
    return fedmpi.train(data="digits", algorithm="fedavg", rounds=1, threads=1, name=f"run{len(DONE)}", **settings)


def of_task(module, **settings):
    return of_data(**{"data": None, "task": module.Task(), "model": None, **settings})


def case(use, there, here, helpers=(HELPERS, HELPERS)):
    """there: the module of the last rank; here: of the others; helpers: a module that it imports, likewise."""
    return use, (there, here), helpers


def with_task(old, new):
    return case(of_task, net() + TASK.replace(old, new), net() + TASK)


HOSTILE = """
class Proxy:
    def __getattribute__(self, name):
        raise RuntimeError(name)
P = Proxy()
"""
HELP = "import helpers\n"
LATE = HELP.replace("\n", "\nfrom helpers import act\n")
DIFFERENT = {
    "activation": case(joined, net("torch.relu(self.layer(x))"), net()),
    "activation, average": case(averaged, net("torch.relu(self.layer(x))"), net()),
    "activation, train": case(of_data, net("torch.relu(self.layer(x))"), net()),
    "layer": case(
        lambda m: fedmpi.average(nn.Sequential(nn.Linear(3, 2), m.Act())), "Act = nn.ReLU\n", "Act = nn.Tanh\n"
    ),
    "dropout": case(
        lambda m: of_data(model=nn.Sequential(nn.Linear(12, 2), m.drop)),
        "drop = nn.Dropout(0.1)\n",
        "drop = nn.Dropout(0.5)\n",
    ),
    "helper": case(joined, *[net("helpers.act(self.layer(x))", HELP)] * 2, (HELPERS.replace("tanh", "relu"), HELPERS)),
    "imported": case(joined, *[net("act(self.layer(x))", LATE)] * 2, (HELPERS.replace("tanh", "relu"), HELPERS)),
    "constant": case(
        joined, *[net("helpers.RATE * self.layer(x)", HELP)] * 2, (HELPERS.replace("0.5", "0.25"), HELPERS)
    ),
    "global": case(joined, net("RATE * self.layer(x)", "RATE = 2\n"), net("RATE * self.layer(x)", "RATE = 1\n")),
    "list": case(
        joined, net("D['a'][0](x)", "D = {'a': [torch.relu]}\n"), net("D['a'][0](x)", "D = {'a': [torch.tanh]}\n")
    ),
    "alias": case(joined, net("F(self.layer(x))", "F = torch.relu\n"), net("F(self.layer(x))", "F = torch.tanh\n")),
    "rank": case(
        joined, *[net("torch.relu(x) if C.rank else torch.tanh(x)", "from mpi4py.MPI import COMM_WORLD as C\n")] * 2
    ),
    "MPI's rank": case(joined, *[net("x if MPI.COMM_WORLD.Get_rank() else -x", "from mpi4py import MPI\n")] * 2),
    "base": case(
        joined,
        *[
            net(
                "self.act(self.layer(x))",
                f"class Base(nn.Module):\n    def act(self, x):\n        return torch.{a}(x)\n",
                "Base",
            )
            for a in ("relu", "tanh")
        ],
    ),
    "base's name": case(
        joined,
        net(before="class A(nn.Module): pass\nclass B(nn.Module): pass\n", base="A"),
        net(before="class A(nn.Module): pass\nclass B(nn.Module): pass\n", base="B"),
    ),
    "decorator": case(
        joined,
        *[
            net(
                "f(self.layer(x))",
                f"def twice(f):\n    @functools.wraps(f)\n    def g(x):\n        return f(x) {o} f(x)\n    return g\n"
                "@twice\ndef f(x):\n    return x\n",
            )
            for o in "-+"
        ],
    ),
    "default": case(
        joined, *[net("f(self.layer(x))", f"S = {s}\ndef f(x, slope=S):\n    return slope * x\n") for s in (1, 2)]
    ),
    "lambda": case(joined, *[net("F(self.layer(x))", f"F = lambda x: x {o} 1\n") for o in "-+"]),
    "two lambdas": case(
        joined,
        *[net("FS[0](self.layer(x))", f"G = [lambda x: x + 1, lambda x: x - 1]\nFS = [G[{n}]]\n") for n in (0, 1)],
    ),
    "partial": case(
        joined, *[net("F(self.layer(x))", f"F = functools.partial(torch.mul, other={n})\n") for n in (3, 2)]
    ),
    "closure": case(
        joined, *[net("F(self.layer(x))", f"def make(k):\n    return lambda x: k * x\nF = make({n})\n") for n in (3, 2)]
    ),
    "nested class": case(
        joined,
        *[
            net("self.Act()(self.layer(x))")
            + f"    class Act:\n        def __call__(self, x):\n            return torch.{a}(x)\n"
            for a in ("relu", "tanh")
        ],
    ),
    "dataclass": case(
        joined,
        *[net("C().k * self.layer(x)", f"@dataclasses.dataclass\nclass C:\n    k: float = {k}\n") for k in (3.0, 2.0)],
    ),
    "enum": case(joined, *[net("E.A.value * self.layer(x)", f"class E(enum.Enum):\n    A = {k}\n") for k in (3, 2)]),
    "own attribute": case(
        joined,
        *[
            net("self.k * self.layer(x)")
            + f"        \nmake = Net\ndef Net():\n    net = make()\n    net.k = K\n    return net\nK = {k}\n"
            for k in (3, 2)
        ],
    ),
    "hook": case(
        joined,
        *[
            net() + f"make = Net\ndef Net():\n    net = make()\n    net.register_forward_hook(lambda m, i, o: {o}o)\n"
            "    return net\n"
            for o in ("-", "2*")
        ],
    ),
    "cached": case(
        joined, *[net("f() * self.layer(x)", f"@functools.lru_cache\ndef f():\n    return {k}\n") for k in (3, 2)]
    ),
    "no_grad": case(
        joined, *[net("f(self.layer(x))", f"@torch.no_grad()\ndef f(x):\n    return {k} * x\n") for k in (3, 2)]
    ),
    "conditional": case(
        joined,
        *[
            net(
                "F(x)",
                f"WHO = {k}\nif WHO:\n    def F(x):\n        return x\nelse:\n    def F(x):\n        return -x\n",
            )
            for k in (1, 0)
        ],
    ),
    "static": case(
        joined,
        *[net("self.act(self.layer(x))") + f"    @staticmethod\n    def act(x):\n        return {o}x\n" for o in "-+"],
    ),
    "property": case(
        joined,
        *[net("self.k * self.layer(x)") + f"    @property\n    def k(self):\n        return {k}\n" for k in (3, 2)],
    ),
    "model function": case(
        of_data,
        *[
            net(f"torch.{a}(self.layer(x))").replace("Net", "Made") + "def Net():\n    return Made()\n"
            for a in ("relu", "tanh")
        ],
    ),
    "loss": with_task("return self.scaled(", "return -self.scaled("),
    "loss's helper": with_task("return self.sign * value", "return 2 * self.sign * value"),
    "loss's value": with_task("sign = 1", "sign = -1"),
    "metric": with_task(".argmax(1)", ".argmin(1)"),
    "task's model": case(of_task, net("torch.relu(self.layer(x))") + TASK, net() + TASK),
    "algorithm": case(lambda m: of_data(algorithm=m.Mine()), ALGORITHM.replace("mul_(1.0)", "mul_(0.5)"), ALGORITHM),
    "joined algorithm": case(
        lambda m: fedmpi.join(nn.Linear(3, 2), m.Mine()), ALGORITHM.replace("mul_(1.0)", "mul_(0.5)"), ALGORITHM
    ),
    "stage": case(
        lambda m: fedmpi.average(nn.Linear(3, 2), stages=[m.Bound()]), STAGE.replace("* 1.0", "* 0.5"), STAGE
    ),
    "aggregation": case(lambda m: of_data(aggregation=m.Whole()), STAGE.replace('"whole": 1.0', '"whole": 2.0'), STAGE),
    "beside the hostile": case(joined, net("P.x * self.layer(x)", HOSTILE), net("P.x + self.layer(x)", HOSTILE)),
    "oracle": case(lambda m: of_data(oracle=m.Careful()), ORACLE.replace("super().", "1 * super()."), ORACLE),
    "partition": case(lambda m: of_file(partition=m.Split()), SPLIT.replace("super().", "0 or super()."), SPLIT),
    "not on all ranks": case(lambda m: fedmpi.join(nn.Linear(3, 2), **m.A), "A = {'may_differ': 'code'}\n", "A = {}\n"),
    "unknown": case(lambda m: fedmpi.average(nn.Linear(3, 2), may_differ="data"), "", ""),
}
TEXTS = '''"""A module."""
# a comment
class Net(nn.Module):
    """Its text."""

    def forward(self, x):
        """What it does."""
        return torch.tanh(  # why
            self.layer(x)
        )

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(
            12,
            2)
'''
EQUAL = {
    "comments, texts, line breaks and order": case(joined, TEXTS, NET),
    "order of functions": case(
        joined,
        *[
            net("f(g(self.layer(x)))", "".join(o))
            for o in (
                ["def f(x): return x\n", "def g(x): return x\n"],
                ["def g(x): return x\n", "def f(x): return x\n"],
            )
        ],
    ),
    "what nothing uses": case(
        joined, net(before="SILO = 'b'\ndef read():\n    return 2\n"), net(before="SILO = 'a'\n")
    ),
    "data": with_task("torch.ones(8, 12)", "torch.randn(8, 12)"),
    "device": case(
        joined,
        *[
            net("self.layer(x)", f"D = torch.device('{d}')\n")
            + f"    device = '{d}'\n    def where(self):\n        return D\n"
            for d in ("cuda:1", "cuda:0")
        ],
    ),
    "tensor": case(joined, *[net("W * self.layer(x)", f"W = torch.ones({n})\n") for n in (2, 1)]),
    "installed": case(lambda m: of_data(model="mlp"), "", ""),
    "hostile": case(joined, *[net("P.x + self.layer(x)", HOSTILE)] * 2),
    "allowed": case(lambda m: allowed(m), net("torch.relu(self.layer(x))"), net()),
    "joined, allowed": case(lambda m: fedmpi.join(m.Net(), may_differ="code"), net("torch.relu(self.layer(x))"), net()),
}


def allowed(module):
    run = of_data(module, may_differ="code")
    assert run.settings["may_differ"] == "code"


WITHOUT_SOURCE = {
    "exec": case(joined, *[f"exec({net(f'torch.{a}(self.layer(x))')!r})\n" for a in ("relu", "tanh")]),
}
CASES = {**DIFFERENT, **EQUAL, **WITHOUT_SOURCE}
DONE = []


def load(number, there, here, helpers):
    """This rank's module of a case."""
    folder = FOLDER / f"rank{RANK}" / str(number)
    folder.mkdir(parents=True)
    for name, texts in (("mine", (FIRST_LINES + there, FIRST_LINES + here)), ("helpers", helpers)):
        (folder / f"{name}.py").write_text(texts[RANK < LAST])
        sys.modules.pop(name, None)
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        return importlib.import_module("mine")
    finally:
        sys.path.remove(str(folder))


def main():
    found = {}
    for number, (name, (use, texts, helpers)) in enumerate(CASES.items()):
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        try:
            module = load(number, *texts, helpers)
            use(module)
            found[name] = "nothing"
        except fedmpi.UserError as error:
            found[name] = str(error)
        DONE.append(name)
    (FOLDER / f"found{RANK}.json").write_text(json.dumps(found))


main()
