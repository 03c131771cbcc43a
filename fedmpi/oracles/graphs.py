"""Gradients that a GPU replays from a recording: of small models, launching the kernels takes longer than running them.

Recorded is what happens at one vector on one minibatch: loss, gradient and running statistics. Drawing samples and the
algorithm's arithmetic run as usual, so numbers like step sizes may change from step to step, and random numbers are
those of the seed that is set before each replay. The kernels are the same as without a recording, and so are the bits.

It has not run on a GPU. Tests replace `cuda_graph` by a recording of torch's operators on the CPU.
"""

import torch

WARM_UP = 3  # runs before a recording, in which libraries choose their kernels
MOST = 16  # recordings; minibatches of further shapes are evaluated as usual


def cuda_graph(function):
    """(what `function()` returns, a function that repeats its kernels on the same memory)."""
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            function()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return result, graph.replay


class Recordings:
    """Recorded evaluations of a model, one for each shape of a minibatch and each vector that the gradient goes to.

    Args:
        flat: a `FlatModule`. record: see `cuda_graph`.
    """

    def __init__(self, flat, record=cuda_graph):
        self._flat, self._record = flat, record
        self._z = torch.empty_like(flat.x)
        self._counters = [counter.clone() for counter in flat.counters]
        self._known = {}  # what a recording is for -> (its minibatch, its loss, its replay)

    @property
    def number(self):
        """How many there are."""
        return len(self._known)

    def evaluate(self, loss_of, seed, z, buffers, batch, out):
        """What `FlatModule.gradient` returns and puts into `out`, at z on a minibatch; None if there is no recording.

        The integer buffers that the module has change as in any pass.

        Args:
            loss_of: `loss_of(module, batch)`. seed: called before a replay, seeds what the model draws at random.
            buffers: float buffers of the model. batch: tensors and numbers in nested tuples.
        """
        shape = _shape(batch)
        key = out.data_ptr(), buffers.data_ptr(), shape
        if shape is None or (key not in self._known and len(self._known) >= MOST):
            return None
        counters = self._flat.counters
        if key not in self._known:
            self._known[key] = self._make(loss_of, z, buffers, batch, out)
        inputs, loss, replay = self._known[key]
        self._z.copy_(z)
        _copy(batch, inputs)
        _copy(tuple(counters), tuple(self._counters))
        seed()
        replay()
        _copy(tuple(self._counters), tuple(counters))
        return loss.clone()

    def _make(self, loss_of, z, buffers, batch, out):
        flat, counters = self._flat, self._flat.counters
        inputs = _empty_like(batch)
        self._z.copy_(z)
        _copy(batch, inputs)
        _copy(tuple(counters), tuple(self._counters))
        before = buffers.clone()
        flat.point_at(self._z, buffers)
        flat.point_counters_at(self._counters)
        try:
            loss, replay = self._record(lambda: flat.gradient(lambda module: loss_of(module, inputs), out))
            if any(found is not mine for found, mine in zip(flat.counters, self._counters)):
                raise RuntimeError("the model puts another tensor in the place of an integer buffer")
        finally:
            flat.point_at(z, buffers)
            flat.point_counters_at(counters)
            buffers.copy_(before)
        return inputs, loss, replay


def _shape(batch):
    """What two minibatches of one recording have in common; None if they contain more than tensors and numbers."""
    if isinstance(batch, torch.Tensor):
        return batch.shape, batch.stride(), batch.dtype
    if isinstance(batch, int | float):
        return batch
    if not isinstance(batch, tuple):
        return None
    parts = tuple(map(_shape, batch))
    return None if None in parts else parts


def _empty_like(batch):
    if isinstance(batch, tuple):
        return tuple(map(_empty_like, batch))
    return torch.empty_like(batch) if isinstance(batch, torch.Tensor) else batch


def _copy(source, target):
    if isinstance(source, tuple):
        for its, part in zip(source, target):
            _copy(its, part)
    elif isinstance(source, torch.Tensor):
        target.copy_(source)
