"""Gradients that a GPU replays from CUDA graphs: of small models, starting the kernels takes longer than running them.

A graph holds one evaluation of loss, gradient and running statistics on minibatches of one shape. It reads and writes
fixed memory, from and to which points, buffers and minibatches are copied. Drawing samples and the algorithm's
arithmetic run as usual. The kernels are those of a plain evaluation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedmpi.ground.errors import UserError
from fedmpi.oracles.flat_module import FlatModule

WARM_UP = 3  # evaluations before a capture, in which libraries choose their kernels
MODE = "thread_local"  # what other threads ask of the GPU meanwhile (NCCL's, a checkpoint's) ends no capture
MOST = 16  # graphs; minibatches of further shapes are evaluated as usual


class CapturedGradients:
    """The graphs of one `FlatModule`, which the clients of a rank share. Each is made when it is first needed."""

    def __init__(self, flat: FlatModule) -> None:
        self._flat = flat
        self._z, self._buffers = torch.empty_like(flat.x), torch.empty_like(flat.buffers)
        self._counters = [counter.clone() for counter in flat.counters]
        self._pool = torch.cuda.graph_pool_handle()  # of memory: no two graphs run at once
        # (address of the gradient, shape of the minibatch) -> (its minibatch, its loss, its graph)
        self._graphs: dict[Any, tuple[Any, torch.Tensor, Any]] = {}

    def gradient(
        self,
        loss_of: Callable[[nn.Module, Any], torch.Tensor],
        seed: Callable[[], None],
        z: torch.Tensor,
        buffers: torch.Tensor,
        batch: Any,
        out: torch.Tensor,
    ) -> torch.Tensor | None:
        """What `FlatModule.gradient` returns and puts into `out` [dim], at z [dim]; None if no graph serves this batch.

        The float buffers [num_buffers] and the module's integer buffers change as in a plain evaluation.

        Args:
            loss_of: `loss_of(module, batch)`. seed: called before each replay; seeds what the model draws at random.
            batch: tensors and numbers in nested tuples; others are not captured.

        Raises:
            UserError: if the evaluation cannot be captured.
        """
        shape = _shape(batch)
        key = out.data_ptr(), shape
        if shape is None or (key not in self._graphs and len(self._graphs) >= MOST):
            return None
        state = (z, buffers, *self._flat.counters)
        kept = (self._z, self._buffers, *self._counters)
        if key not in self._graphs:
            _copy(state, kept)
            self._graphs[key] = self._capture(loss_of, batch, out)
            self._flat.point_at(z, buffers)
            self._flat.point_counters_at(state[2:])
        inputs, loss, graph = self._graphs[key]
        _copy((state, batch), (kept, inputs))
        seed()
        graph.replay()
        _copy(kept[1:], state[1:])
        return loss.clone()

    def _capture(
        self, loss_of: Callable[[nn.Module, Any], torch.Tensor], batch: Any, out: torch.Tensor
    ) -> tuple[Any, torch.Tensor, Any]:
        """(minibatch that the graph reads, loss that it writes, the graph)."""
        flat, inputs = self._flat, _clone(batch)
        flat.point_at(self._z, self._buffers)
        flat.point_counters_at(self._counters)
        current, stream, graph = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        try:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    flat.gradient(lambda module: loss_of(module, inputs), out)
            current.wait_stream(stream)
            # A capture that fails does not give the current stream back.
            with torch.cuda.stream(current), torch.cuda.graph(graph, pool=self._pool, capture_error_mode=MODE):
                loss = flat.gradient(lambda module: loss_of(module, inputs), out)
        except RuntimeError as error:  # a copy to the host, a size that depends on values
            raise UserError(
                f"compile = cuda_graph: a pass cannot be captured ({str(error).splitlines()[0]}): leave it out"
            ) from error
        if any(found is not kept for found, kept in zip(flat.counters, self._counters)):
            raise UserError("compile = cuda_graph: the model replaces an integer buffer in a pass: leave it out")
        return inputs, loss, graph


def _shape(batch: Any) -> Any:
    """What minibatches of one graph have in common; None if they hold more than tensors and numbers."""
    if isinstance(batch, torch.Tensor):
        return batch.shape, batch.stride(), batch.dtype
    if not isinstance(batch, tuple):
        return batch if isinstance(batch, int | float) else None
    parts = tuple(map(_shape, batch))
    return None if None in parts else parts


def _clone(batch: Any) -> Any:
    if isinstance(batch, tuple):
        return tuple(map(_clone, batch))
    return batch.clone() if isinstance(batch, torch.Tensor) else batch


def _copy(source: Any, target: Any) -> None:
    if isinstance(source, tuple):
        for source_part, target_part in zip(source, target):
            _copy(source_part, target_part)
    elif isinstance(source, torch.Tensor):
        target.copy_(source)
