"""Flat buffers: a module's parameters as views of one vector, a rank's state as rows of one matrix."""

import functools
import itertools
import math
import weakref

import torch
from torch import nn
from torch.nn import functional

from fedmpi.errors import UserError

_NOTHING = (None, None)
LARGE_LAYER = 1 << 18  # weights; below, writing a gradient twice costs nothing that could be seen


class FlatModule:
    """A module whose trainable parameters can be pointed at any vector of their total length.

    Evaluating the module at a vector costs no copy: the parameters become views of it. Float
    buffers (batch-norm statistics) are views of a second, short vector in the same way; integer
    buffers and frozen parameters stay where they are.

    Args:
        module: a `torch.nn.Module`; taken over, its parameters are re-homed.
        channels_last: whether 4-d weights lie in the vector in channels-last order, so that
            convolutions read and write them without converting.
        direct_gradients: whether large linear layers compute the gradient of their weights where
            `gradient` is to put it. The product is the same; it may round differently.

    Attributes:
        dim: d, number of trainable parameters; num_buffers: number of float buffer elements.
        x: [dim] the initial parameters; buffers: [num_buffers] the initial float buffers.
        counters: the integer buffers of the module (numbers of batches seen).
        names, shapes, segments: of the parameter tensors; a segment is a slice of a [dim] vector.

    Raises:
        UserError: if the module has no trainable parameter.
    """

    def __init__(self, module, channels_last=False, direct_gradients=True):
        self.module = module
        self._views = {}  # id of a row -> (weak reference to it, its parameter-shaped views)
        self._large_layers = []  # positions of their weights in `parameters`
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise UserError(f"model {type(module).__name__} has no trainable parameter")
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.shapes = [tuple(p.shape) for p in self.parameters]
        self._sizes = [p.numel() for p in self.parameters]
        self._permuted = [channels_last and p.dim() == 4 for p in self.parameters]
        self.dim = sum(self._sizes)
        ends = list(itertools.accumulate(self._sizes))
        self.segments = [slice(end - size, end) for end, size in zip(ends, self._sizes)]
        self._buffers = [
            (owner, key, f"{prefix}.{key}" if prefix else key, tuple(buffer.shape))
            for prefix, owner in module.named_modules()
            for key, buffer in owner.named_buffers(recurse=False)
            if buffer.is_floating_point()
        ]
        self.counters = [buffer for buffer in module.buffers() if not buffer.is_floating_point()]
        self._counts = {None: [counter.clone() for counter in self.counters]}  # of clients that had their turn
        self._counting = None  # whose values the counters hold
        self.x = self.flatten(self.parameters)
        values = [getattr(owner, key).reshape(-1) for owner, key, _, _ in self._buffers]
        self.buffers = torch.cat(values) if values else self.x.new_empty(0)
        self.num_buffers = self.buffers.numel()
        self.point_at(self.x, self.buffers)
        self._wanted = {}  # position -> where the gradient is wanted, while one is computed
        if direct_gradients:
            self._redirect()

    def views(self, vector):
        """The parameter-shaped views of a [dim] vector, in the order of `names`."""
        views = []
        for piece, shape, permuted in zip(vector.split(self._sizes), self.shapes, self._permuted):
            if permuted:
                out_channels, in_channels, height, width = shape
                views.append(piece.view(out_channels, height, width, in_channels).permute(0, 3, 1, 2))
            else:
                views.append(piece.view(shape))
        return views

    def _known_views(self, vector):
        """The same, made once for each vector."""
        key = id(vector)
        reference, views = self._views.get(key, _NOTHING)
        if reference is None or reference() is not vector:
            # of an alias: they must not keep alive the vector that they are remembered by
            views = self.views(vector.data)
            self._views[key] = weakref.ref(vector, lambda _, known=self._views: known.pop(key, None)), views
        return views

    @torch.no_grad()
    def flatten(self, tensors, out=None):
        """Parameter-shaped tensors, in the order of `names`, as one [dim] vector.

        Args:
            out: the vector to fill; gradients of large layers that lie in it already stay there.
        """
        if out is None:
            out = tensors[0].new_empty(self.dim)
        self._fill(self._known_views(out), tensors)
        return out

    def _fill(self, views, tensors):
        views, tensors = list(views), list(tensors)
        for position in sorted(self._large_layers, reverse=True):
            if views[position].data_ptr() == tensors[position].data_ptr():
                del views[position], tensors[position]
        if views:
            torch._foreach_copy_(views, tensors)

    def gradient(self, loss_of, out):
        """The loss `loss_of(module)` at the current parameters, without a graph; its gradient goes into `out`."""
        views = self._known_views(out)
        self._wanted = {position: views[position] for position in self._large_layers}
        try:
            loss = loss_of(self.module)
            gradients = torch.autograd.grad(loss, self.parameters)
        finally:
            self._wanted = {}
        self._fill(views, gradients)
        return loss.detach()

    def _redirect(self):
        """Let large linear layers ask for the place of their weight's gradient."""
        positions = {id(parameter): position for position, parameter in enumerate(self.parameters)}
        for layer in self.module.modules():
            weight = getattr(layer, "weight", None)
            if type(layer) is nn.Linear and id(weight) in positions and weight.numel() >= LARGE_LAYER:
                self._large_layers.append(positions[id(weight)])
                layer.forward = functools.partial(self._linear, layer, positions[id(weight)])

    def _linear(self, layer, position, inputs):
        # A weight that is used twice goes the usual way the second time: its gradient is a sum.
        wanted = self._wanted.pop(position, None) if torch.is_grad_enabled() else None
        if wanted is None or torch.is_autocast_enabled(inputs.device.type):
            return functional.linear(inputs, layer.weight, layer.bias)
        return _LinearInto.apply(inputs, layer.weight, layer.bias, wanted)

    def point_at(self, vector, buffers=None):
        """Make the parameters views of `vector` [dim] and, if given, the float buffers of `buffers`."""
        views = self._known_views(vector)
        if self.parameters[-1].data_ptr() != views[-1].data_ptr():  # otherwise they are there since last time
            for parameter, view in zip(self.parameters, views):
                parameter.data = view
        if buffers is not None:
            offset = 0
            for owner, key, _, shape in self._buffers:
                size = math.prod(shape)
                owner._buffers[key] = buffers[offset : offset + size].view(shape)
                offset += size

    def hold_counters(self, client):
        """Let the integer buffers be those of a client; each has its own, from the module's first on."""
        if client == self._counting or not self.counters:
            return
        self._counts[self._counting] = [counter.clone() for counter in self.counters]
        for counter, value in zip(self.counters, self._counts.get(client, self._counts[None])):
            counter.copy_(value)
        self._counting = client

    def named_views(self, vector, buffers):
        """Name -> view of the parameters in `vector` [dim] and of the float buffers in `buffers`.

        The module itself stays as it is: this is for `torch.func.functional_call`.
        """
        values = dict(zip(self.names, self.views(vector)))
        if self._buffers:
            sizes = [math.prod(shape) for _, _, _, shape in self._buffers]
            pieces = buffers.split(sizes)
            values.update({name: p.view(shape) for (_, _, name, shape), p in zip(self._buffers, pieces)})
        return values

    def named_values(self, vector, buffers):
        """Name -> tensor (views) of all parameters at `vector` and all buffers at `buffers`.

        The keys and shapes are those of the module's own `state_dict()`.
        """
        self.point_at(vector, buffers)
        return self.module.state_dict()


class _LinearInto(torch.autograd.Function):
    """`functional.linear` whose weight gradient is computed in given memory and not copied there."""

    @staticmethod
    def forward(ctx, inputs, weight, bias, wanted):
        ctx.save_for_backward(inputs, weight)
        ctx.wanted = wanted
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        rows, columns = gradient.reshape(-1, weight.shape[0]), inputs.reshape(-1, weight.shape[1])
        of_inputs = gradient @ weight if ctx.needs_input_grad[0] else None
        differentiable = torch.is_grad_enabled()  # a loss that contains gradients
        of_weight = rows.t() @ columns if differentiable else torch.mm(rows.t(), columns, out=ctx.wanted)
        return of_inputs, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class RankState:
    """The vectors of one rank: its clients' rows, the replicated server's rows, and the exchanged block.

    With one client on the rank the exchanged rows exist once: the client works in them, they are
    averaged in place, and they are the server's rows then.
    With several clients they share one set of working rows (a client owns it during its turn), their
    sum gathers in further blocks, and the averages lie in one more; memory for exchanged and scratch
    rows grows with the logarithm of the number of clients only.

    Args:
        algorithm: names the rows (`fedmpi.algorithms.base`).
        dim: d; num_buffers: elements of float buffers, averaged behind the last exchanged row.
        num_local: clients of this rank.
        dtype, device: of every row.
        poison: fill scratch rows with NaN at every turn, so that nobody relies on their past.
        allocate: `allocate(numel, dtype, device) -> [numel]` zeros for the block to be summed over
            the ranks: a link's, which knows the memory where that is cheapest; None: any memory.

    Attributes:
        block: the averages: what the server holds of the exchanged rows, and its float buffers.
        outgoing: of the same shape; what is summed over the ranks. The same memory with one client.
    """

    def __init__(self, algorithm, dim, num_buffers, num_local, dtype, device="cpu", poison=False, allocate=None):
        self.dim = dim
        self._exchanged, self._scratch = algorithm.exchanged, algorithm.scratch
        self._poison = poison
        self._block_size = len(self._exchanged) * dim + num_buffers
        kept, scratch = len(algorithm.client_rows), len(self._scratch)
        zeros = functools.partial(torch.zeros, dtype=dtype, device=device)
        self.outgoing = (allocate or torch.zeros)(self._block_size, dtype=dtype, device=device)
        self._scratch_rows = zeros(scratch, dim)
        self._kept = zeros(num_local, kept, dim)
        self._shared = num_local > 1
        if self._shared:
            self._work = zeros(self._block_size)
            self.block = zeros(self._block_size)
            # _sums[l]: the sum of 2^l clients; the last is the whole sum if all of them take part
            self._sums = [*zeros(num_local.bit_length() - 1, self._block_size), self.outgoing]
            several = len(algorithm.exchanges()) > 1
            self._later = zeros(num_local, self._block_size) if several else None
        else:
            self._work = self.block = self.outgoing
        self._server = zeros(len(algorithm.server_rows), dim)
        self._server_names, self._kept_names = algorithm.server_rows, algorithm.client_rows

    def server_rows(self):
        """Name -> [dim] of the rows that only the server has, alike on every rank."""
        return dict(zip(self._server_names, self._server))

    def averaged_rows(self):
        """Name -> [dim] of the exchanged rows as the last Allreduce left them."""
        return self._named_block(self.block)

    @property
    def buffers(self):
        """[num_buffers] float buffers of the averaged model."""
        return self.block[len(self._exchanged) * self.dim :]

    @property
    def work_buffers(self):
        """[num_buffers] float buffers of the client whose turn it is."""
        return self._work[len(self._exchanged) * self.dim :]

    def client_rows(self, position):
        """Name -> [dim] of all rows of the rank's client number `position`."""
        rows = self._named_block(self._work)
        rows.update(zip(self._scratch, self._scratch_rows))
        rows.update(zip(self._kept_names, self._kept[position]))
        return rows

    def region(self, rows):
        """The slice of the block that holds consecutive `rows`, with the buffers behind the last one."""
        first = self._exchanged.index(rows[0])
        stop = first + len(rows)
        if self._exchanged[first:stop] != tuple(rows):
            raise ValueError(f"{rows}: not consecutive in the exchanged rows {self._exchanged}")
        end = self._block_size if stop == len(self._exchanged) else stop * self.dim
        return slice(first * self.dim, end)

    def begin_turn(self, position, first_in_round, region):
        """Hand the working rows to a client: averages where averaged, its own values where not yet."""
        if self._poison:
            self._scratch_rows.fill_(float("nan"))
        if not self._shared:
            return
        if first_in_round or self._later is None:
            self._work.copy_(self.block)
        else:
            self._work[: region.start].copy_(self.block[: region.start])
            self._work[region.start :].copy_(self._later[position, region.start :])

    def end_turn(self, position, region, weight, turn):
        """Add the client's share to the rank's sum and keep what a later exchange of the round needs.

        Args:
            position: of the client on this rank; turn: how many clients of the rank worked before it.
            region: see `region`; weight: of the client in the sum.
        """
        mine = self._work[region]
        if weight != 1:
            mine.mul_(weight)
        if not self._shared:
            return
        # Pairwise, like a binary counter: level l holds the sum of 2^l clients. Where clients are
        # placed in powers of two, the sum is then the same tree as a reduction over ranks builds.
        level = (turn ^ (turn + 1)).bit_length() - 1  # where the sum of this and earlier clients goes
        for full in range(level - 1):
            mine.add_(self._sums[full][region])
        if level == 0:
            self._sums[0][region].copy_(mine)
        else:
            torch.add(mine, self._sums[level - 1][region], out=self._sums[level][region])
        if self._later is not None:
            self._later[position, region.stop :].copy_(self._work[region.stop :])

    def sum(self, region, num_turns):
        """The contiguous vector to be summed over the ranks, after `num_turns` clients' turns."""
        outgoing = self.outgoing[region]
        if num_turns == 0:
            return outgoing.zero_()
        if not self._shared:
            return outgoing
        levels = [level for level in range(len(self._sums)) if num_turns >> level & 1]
        total = self._sums[levels[0]][region]
        for level in levels[1:]:
            total = self._sums[level][region].add_(total)
        if levels[-1] != len(self._sums) - 1:
            outgoing.copy_(total)
        return outgoing

    def _named_block(self, block):
        rows = block[: len(self._exchanged) * self.dim].view(-1, self.dim)
        return dict(zip(self._exchanged, rows))
