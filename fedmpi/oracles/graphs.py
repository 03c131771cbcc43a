"""Gradients that a GPU replays from a recording: of small models, launching the kernels takes longer than running them.

Recorded is what happens at one vector on one minibatch: loss, gradient and running statistics. Drawing samples and the
algorithm's arithmetic run as usual, so numbers like step sizes may change from step to step, and random numbers are
those of the seed that is set before each replay. The kernels are the same as without a recording, and so are the bits.

It has not run on a GPU. Tests replace `cuda_graph` by a recording of torch's operators on the CPU.
"""

import warnings

import torch

WARM_UP = 3  # runs before a recording, in which libraries choose their kernels
MODE = "thread_local"  # what other threads ask of the GPU meanwhile (NCCL's, a checkpoint's) ends no recording
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
    # A recording that fails does not give the current stream back.
    with torch.cuda.stream(current), torch.cuda.graph(graph, capture_error_mode=MODE):
        result = function()
    return result, graph.replay


class CudaTape:
    """What happens on a GPU, recorded as one CUDA graph and a further one after each cut.

    They share memory, because they are always replayed in their order and not at the same time.
    """

    def __init__(self):
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._graphs, self._capture = [], None

    def rehearse(self, function):
        """Run a function a few times before it is recorded."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                function()
        current.wait_stream(self._stream)

    def record(self, function):
        """Record what a function does, without doing it."""
        with torch.cuda.stream(torch.cuda.current_stream()):  # a recording that fails does not give it back
            self._begin()
            try:
                function()
            finally:
                if self._capture is not None:  # else a cut failed
                    self._end()

    def cut(self, between):
        """End a part, call `between()`, which is not recorded, and begin the next part."""
        self._end()
        between()
        self._begin()

    def replay(self, part):
        """Do what a part contains."""
        self._graphs[part].replay()

    def _begin(self):
        self._graphs.append(torch.cuda.CUDAGraph())
        self._capture = torch.cuda.graph(
            self._graphs[-1], pool=self._pool, stream=self._stream, capture_error_mode=MODE
        )
        self._capture.__enter__()

    def _end(self):
        capture, self._capture = self._capture, None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a step that begins by drawing
            capture.__exit__(None, None, None)


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
        shape = shape_of_batch(batch)
        key = out.data_ptr(), buffers.data_ptr(), shape
        if shape is None or (key not in self._known and len(self._known) >= MOST):
            return None
        counters = self._flat.counters
        if key not in self._known:
            self._known[key] = self._make(loss_of, z, buffers, batch, out)
        inputs, loss, replay = self._known[key]
        self._z.copy_(z)
        copy_batch(batch, inputs)
        copy_batch(tuple(counters), tuple(self._counters))
        seed()
        replay()
        copy_batch(tuple(self._counters), tuple(counters))
        return loss.clone()

    def _make(self, loss_of, z, buffers, batch, out):
        flat, counters = self._flat, self._flat.counters
        inputs = empty_like_batch(batch)
        self._z.copy_(z)
        copy_batch(batch, inputs)
        copy_batch(tuple(counters), tuple(self._counters))
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


def shape_of_batch(batch):
    """What two minibatches of one recording have in common; None if they contain more than tensors and numbers."""
    if isinstance(batch, torch.Tensor):
        return batch.shape, batch.stride(), batch.dtype
    if isinstance(batch, int | float):
        return batch
    if not isinstance(batch, tuple):
        return None
    parts = tuple(map(shape_of_batch, batch))
    return None if None in parts else parts


def empty_like_batch(batch):
    if isinstance(batch, tuple):
        return tuple(map(empty_like_batch, batch))
    return torch.empty_like(batch) if isinstance(batch, torch.Tensor) else batch


def copy_batch(source, target):
    if isinstance(source, tuple):
        for its, part in zip(source, target):
            copy_batch(its, part)
    elif isinstance(source, torch.Tensor):
        target.copy_(source)
