"""Modules that PyTorch allows and that are seldom seen; all classify 8x8 images."""

import random

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SIZE, HIDDEN, CLASSES = 64, 6, 10


class Base(nn.Module):
    """Two layers; subclasses change what is odd."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs):
        return self.last(torch.tanh(self.first(inputs.flatten(1))))


class UnusedHead(Base):
    """An auxiliary head, a parameter without elements, and one in last place."""

    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(HIDDEN, 3)
        self.empty = nn.Parameter(torch.empty(0))


class Branches(Base):
    """Only one of two branches takes part in a pass, by what the batch holds."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(SIZE, HIDDEN)

    def forward(self, inputs):
        layer = self.first if inputs.mean() > -0.005 else self.other
        return self.last(torch.tanh(layer(inputs.flatten(1))))


class Lazy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.LazyLinear(HIDDEN), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(CLASSES))


class Wide(nn.Sequential):
    """A layer whose weight gradient is computed in place, behind one of an odd size."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(SIZE, 4099), nn.ReLU(), nn.Linear(4099, CLASSES))


class MovingBuffer(Base):
    """A buffer assigned anew in every pass of training, and used."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ema", torch.zeros(HIDDEN))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, inputs):
        hidden = self.first(inputs.flatten(1))
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * hidden.detach().mean(0)
            self.steps = self.steps + 1
        return self.last(torch.tanh(hidden - self.ema))


class MovingData(Base):
    """A parameter whose .data the module replaces before it is used."""

    def forward(self, inputs):
        if self.training:
            self.first.weight.data = self.first.weight.data.clamp(-0.05, 0.05)
            self.last.bias.data = self.last.bias.data * 0.5
        return super().forward(inputs)


class SharedBuffer(nn.Module):
    """Two parts that hold one buffer; one writes it, the other reads it."""

    class Part(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.register_buffer("shared", shared)
            self.weight = nn.Parameter(torch.zeros(HIDDEN))

        def forward(self, hidden, writes):
            if writes and self.training:
                self.shared.add_(hidden.detach().mean(0))
            return hidden + 0.1 * self.shared + self.weight

    def __init__(self):
        super().__init__()
        shared = torch.zeros(HIDDEN)
        self.one, self.two = self.Part(shared), self.Part(shared)
        self.first, self.last = nn.Linear(SIZE, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs.flatten(1)))
        return self.last(self.two(self.one(hidden, True), False))


class Tied(Base):
    """One parameter under two names."""

    def __init__(self):
        super().__init__()
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.again = nn.Linear(HIDDEN, HIDDEN)
        self.again.weight = self.middle.weight

    def forward(self, inputs):
        hidden = self.again(torch.tanh(self.middle(self.first(inputs.flatten(1)))))
        return self.last(hidden)


class SparseGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(300, HIDDEN, sparse=True), nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs):
        index = (inputs.flatten(1) * 40).long().clamp(-149, 149) + 150
        return self.last(self.table(index).mean(1))


class Parametrised(Base):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.first)
        nn.utils.parametrizations.spectral_norm(self.last)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.last = nn.GRU(8, HIDDEN, batch_first=True), nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs):
        return self.last(self.gru(inputs[:, 0])[0][:, -1])


class Scalars(Base):
    """A parameter without dimensions, a slash in a name, containers, infinite values in a mask."""

    def __init__(self):
        super().__init__()
        self.register_parameter("scale/of it", nn.Parameter(torch.tensor(1.5)))
        self.list = nn.ParameterList([torch.ones(HIDDEN), torch.ones(1)])
        self.dict = nn.ParameterDict({"a": torch.ones(HIDDEN)})
        self.register_buffer("mask", torch.full((HIDDEN,), -0.5))
        self.register_buffer("causal", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("none", None)
        self.register_buffer("unsaved", torch.ones(HIDDEN), persistent=False)

    def forward(self, inputs):
        hidden = self.first(inputs.flatten(1)) * self.list[0] * self.dict["a"] * self.unsaved + self.list[1]
        return self.last(torch.tanh(hidden + self.mask)) * getattr(self, "scale/of it")


class Frozen(Base):
    def __init__(self):
        super().__init__()
        self.first.weight.requires_grad_(False)
        self.number = nn.Parameter(torch.tensor([3]), requires_grad=False)


class FreezesLater(Base):
    """It freezes a layer after some passes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, inputs):
        if self.training:
            self.passes += 1
        self.first.weight.requires_grad_(bool(self.passes < 3))
        return super().forward(inputs)


class GradientInside(Base):
    """Its output contains a gradient."""

    def forward(self, inputs):
        inputs = inputs.detach().requires_grad_(True)
        with torch.enable_grad():
            scores = super().forward(inputs)
            (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
        return scores + slope.square().mean()


class OwnForward(nn.Sequential):
    """A large layer whose forward the user has replaced."""

    def __init__(self):
        wide = nn.Linear(SIZE, 4200)
        super().__init__(nn.Flatten(), wide, nn.ReLU(), nn.Linear(4200, CLASSES))
        wide.forward = lambda inputs: functional.linear(inputs, wide.weight * 0.5, wide.bias)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(SIZE, CLASSES), nn.BatchNorm1d(CLASSES)))

    def forward(self, inputs):
        return self.net(inputs)


class Dropping(Base):
    def forward(self, inputs):
        return functional.dropout(super().forward(inputs), 0.3, self.training)


class NumpyStart(Base):
    """Its initial values come from numpy's and Python's generators."""

    def __init__(self):
        super().__init__()
        self.first.weight.data = torch.tensor(np.random.standard_normal((HIDDEN, SIZE)), dtype=torch.float32) / 8
        self.last.bias.data.fill_(random.random())


class Swapping(Base):
    """Two parameters and two buffers change places; a buffer remembers the one before, which is assigned anew."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.full((HIDDEN,), value)) for value in (1.0, 0.5))
        for name in ("now", "before", "even", "odd"):
            self.register_buffer(name, torch.randn(HIDDEN))

    def forward(self, inputs):
        hidden = self.first(inputs.flatten(1))
        if self.training:
            self.one.data, self.two.data = self.two.data, self.one.data
            self.even, self.odd = self.odd, self.even
            self.before, self.now = self.now, 0.9 * self.now + 0.1 * hidden.detach().mean(0)
        return self.last(torch.tanh(hidden * self.one + self.two * self.before + 0.1 * self.odd))


class Attention(nn.Module):
    """Attention, a transformer's layer with dropout, and checkpointing."""

    def __init__(self):
        super().__init__()
        self.up, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer, self.last = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, inputs):
        hidden = self.up(inputs[:, 0])
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        return self.last(checkpoint(self.layer, hidden, use_reentrant=False).mean(1))


class Hooked(Base):
    """Hooks of modules, forward and backward, and of a parameter; a sign whose gradient is that of the identity."""

    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.sign()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.clamp(-1, 1)

    def __init__(self):
        super().__init__()
        self.first.register_forward_hook(lambda part, inputs, outputs: outputs + 0.1 * self.Sign.apply(outputs))
        self.last.register_full_backward_hook(lambda part, inputs, outputs: (0.5 * inputs[0],))
        self.first.weight.register_hook(lambda gradient: 0.5 * gradient)


class Lying(nn.Module):
    """Weights that are not contiguous, in float64 and bfloat16, one module in two places, old-style norms."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, HIDDEN), nn.Linear(HIDDEN, CLASSES).double()
        self.first.weight = nn.Parameter(torch.randn(SIZE, HIDDEN).t())
        self.middle = nn.Sequential(nn.Linear(HIDDEN, HIDDEN).bfloat16(), nn.BatchNorm1d(HIDDEN, affine=False))
        self.again = self.middle
        nn.utils.spectral_norm(self.first)

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs.flatten(1)))
        for layer in (self.middle, self.again):
            hidden = layer(hidden.to(self.last.weight.dtype))
        return self.last(hidden)


TRAIN = [
    UnusedHead, Branches, Lazy, MovingBuffer, MovingData, SharedBuffer, Tied, SparseGradient, Parametrised, Recurrent,
    Scalars, Frozen, FreezesLater, GradientInside, OwnForward, Scripted, Dropping, NumpyStart, Swapping, Attention,
    Hooked, Lying,
]  # fmt: skip


class Detached(Base):
    def forward(self, inputs):
        return super().forward(inputs).detach()


class NoGrad(Base):
    @torch.no_grad()
    def forward(self, inputs):
        return super().forward(inputs)


class Inference(Base):
    @torch.inference_mode()
    def forward(self, inputs):
        return super().forward(inputs)


class ComplexBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("turns", torch.ones(3, dtype=torch.complex64))


class ComplexWeight(Base):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class SparseBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("graph", torch.eye(3).to_sparse())


class Quantised(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("q", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))


class ExtraState(Base):
    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        pass


class SlashClash(Base):
    """ "a" is a tensor and, in a file, a folder."""

    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.ones(2))
        self.register_buffer("a/b", torch.ones(2))


class Overlapping(Base):
    def __init__(self):
        super().__init__()
        self.part = nn.Parameter(self.first.weight.data[0])


class ParameterAsBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("copy", self.last.bias.data)


class Meta(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(SIZE, CLASSES, device="meta"))


class Growing(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("history", torch.zeros(1))

    def forward(self, inputs):
        if self.training:
            self.history = torch.cat([self.history, inputs.mean().reshape(1)])
        return super().forward(inputs)


class NewParameter(Base):
    def forward(self, inputs):
        self.last.bias = nn.Parameter(self.last.bias.detach() * 0.9)
        return super().forward(inputs)


class MomentumEncoder(Base):
    """It moves its frozen copy in every pass."""

    def __init__(self):
        super().__init__()
        self.target = nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)

    def forward(self, inputs):
        self.target.data = 0.9 * self.target.data + 0.1 * self.first.bias.data
        return super().forward(inputs)


class TupleInTraining(Base):
    def forward(self, inputs):
        scores = super().forward(inputs)
        return (scores, scores) if self.training else scores


class InfiniteStart(Base):
    def __init__(self):
        super().__init__()
        self.last.bias.data.fill_(torch.inf)


class NeverInitialised(Base):
    def __init__(self):
        super().__init__()
        self.later = nn.LazyLinear(3)


class Asserts(Base):
    def __init__(self):
        super().__init__()
        raise AssertionError("this\nhouse is not for you")


class Reentrant(Base):
    """Its checkpoint hides the first layer from `torch.autograd.grad`."""

    def forward(self, inputs):
        inputs = inputs.flatten(1).requires_grad_()
        return self.last(checkpoint(lambda values: torch.tanh(self.first(values)), inputs, use_reentrant=True))


class AfterGradient(Base):
    def __init__(self):
        super().__init__()
        self.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)


class NewLayer(Base):
    """It adds a layer in its first pass of training."""

    def forward(self, inputs):
        if self.training and not hasattr(self, "more"):
            self.more = nn.Linear(CLASSES, CLASSES)
        scores = super().forward(inputs)
        return self.more(scores) if hasattr(self, "more") else scores


class LaterLayer(Base):
    """After some passes it adds a layer."""

    def __init__(self):
        super().__init__()
        self._passes = 0

    def forward(self, inputs):
        self._passes += self.training
        if self._passes == 4:
            self.more = nn.Linear(CLASSES, CLASSES)
        return super().forward(inputs)


class LaterThawed(Base):
    """After some passes it trains a layer that was frozen."""

    def __init__(self):
        super().__init__()
        self.first.weight.requires_grad_(False)
        self._passes = 0

    def forward(self, inputs):
        self._passes += self.training
        self.first.weight.requires_grad_(self._passes > 4)
        return super().forward(inputs)


LATER = {LaterLayer: "adds 'more.weight'", LaterThawed: "unfreezes 'first.weight'"}

REFUSED = {
    Detached: "the loss does not depend on its parameters",
    NoGrad: "the loss does not depend on its parameters",
    Inference: "the loss does not depend on its parameters",
    ComplexBuffer: "'turns' is complex",
    ComplexWeight: "'phase' is complex",
    SparseBuffer: "'graph' is sparse",
    Quantised: "'q' is quantized",
    ExtraState: "the entry '_extra_state' of its state dict is a dict",
    SlashClash: "its state dict cannot be saved",
    Overlapping: "'part' and 'first.weight' share memory",
    ParameterAsBuffer: "share memory",
    Meta: "'1.weight' is on the device meta",
    Growing: "gives 'history' the shape [2]: expected [1]",
    NewParameter: "another object in the place of parameter 'last.bias'",
    MomentumEncoder: "a pass changes the frozen parameter 'target'",
    TupleInTraining: "does not train: TypeError",
    InfiniteStart: "before any training: check the values of the data and the model's initial parameters",
    NeverInitialised: "'later.weight' is not initialised",
    Reentrant: "finds the gradient of 'first.weight': for checkpointing, use",
    AfterGradient: "'first.weight' has a post-accumulate-grad hook",
    NewLayer: "a pass adds 'more.weight'",
    Asserts: "model Asserts: AssertionError: this house is not for you",
}


class OfRank(Base):
    """Another model on another rank, in the way that `kind` says."""

    def __init__(self, kind: str = "value"):
        super().__init__()
        rank = MPI.COMM_WORLD.rank
        if kind == "value" and rank == 1:
            self.last.bias.data[3] += 1e-3
        if kind == "frozen":
            self.moment = nn.Parameter(torch.tensor(float(rank)), requires_grad=False)
        if kind == "buffer":
            self.register_buffer("table", torch.ones(2 + rank))


class LastGradient(Base):
    """Its `step`-th gradient is not finite, on one rank, although its loss is."""

    def __init__(self, step: int = 3, rank: int = 1):
        super().__init__()
        self._step, self._is_here, self._passes = step, MPI.COMM_WORLD.rank == rank, 0  # without the trial

    def forward(self, inputs):
        scores = super().forward(inputs)
        self._passes += self.training
        if self.training and self._is_here and self._passes == self._step:
            scores = scores + (self.first.bias * 0).abs().sqrt().sum()
        return scores


class Moving(MovingBuffer):
    """What is replaced and what is not used, and clamped; for what is saved."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)

    def forward(self, inputs):
        self.last.weight.data = self.last.weight.data.clamp(-0.2, 0.2)
        return super().forward(inputs)
