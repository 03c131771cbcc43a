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
LARGE_LAYER = 1 << 18  # weights; in smaller layers, the copy of the gradient takes no measurable time


class FlatModule:
    """A module whose trainable parameters can be pointed at any vector of their total length.

    Evaluating the module at a vector costs no copy: the parameters become views of it. Float
    buffers (batch-norm statistics) are views of a second, short vector in the same way; integer
    buffers and frozen parameters stay where they are.

    Args:
        module: a `torch.nn.Module`; taken over, its parameters are re-homed.
        channels_last: whether 4-d weights lie in the vector in channels-last order, so that
            convolutions read and write them without converting; None: each as it lies now.
        direct_gradients: whether large linear layers compute the gradient of their weights where
            `gradient` is to put it. The product is the same; it may round differently.
        alignment: each parameter begins at a multiple of so many elements; what lies between them is 0.

    Attributes:
        dim: d, number of trainable parameters, and of the elements between them; num_buffers: of float buffer elements.
        x: [dim] the initial parameters; buffers: [num_buffers] the initial float buffers.
        names, shapes, segments: of the parameter tensors; a segment is a slice of a [dim] vector.
        permuted: for each parameter tensor, whether it lies in a vector in channels-last order.

    Raises:
        UserError: if the module has no trainable parameter.
    """

    def __init__(self, module, channels_last=False, direct_gradients=True, alignment=1):
        self.module = module
        self._views = {}  # id of a row -> (weak reference to it, its parameter-shaped views)
        self._large_layers = []  # positions of their weights in `parameters`
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise UserError(f"model {type(module).__name__} has no trainable parameter")
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.shapes = [tuple(p.shape) for p in self.parameters]
        self._sizes = [-(-p.numel() // alignment) * alignment for p in self.parameters]  # with what follows each
        self.permuted = [_lies_permuted(p, channels_last) for p in self.parameters]
        self.dim = sum(self._sizes)
        begins = [end - size for end, size in zip(itertools.accumulate(self._sizes), self._sizes)]
        self.segments = [slice(begin, begin + p.numel()) for begin, p in zip(begins, self.parameters)]
        self._buffers = [
            (owner, key, f"{prefix}.{key}" if prefix else key, tuple(buffer.shape))
            for prefix, owner in module.named_modules()
            for key, buffer in owner.named_buffers(recurse=False)
            if buffer.is_floating_point()
        ]
        self._integer_buffers = [
            (owner, key)
            for owner in module.modules()
            for key, buffer in owner.named_buffers(recurse=False)
            if not buffer.is_floating_point()
        ]
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
        for piece, shape, permuted in zip(vector.split(self._sizes), self.shapes, self.permuted):
            piece = piece[: math.prod(shape)]  # without what follows it for the sake of alignment
            if permuted:
                out_channels, in_channels, height, width = shape
                views.append(piece.view(out_channels, height, width, in_channels).permute(0, 3, 1, 2))
            else:
                views.append(piece.view(shape))
        return views

    @torch.no_grad()
    def load(self, values):
        """Take other initial parameters and buffers.

        Args:
            values: name -> tensor, as `named_values` names them; buffers that are missing stay as they are.
        """
        for name, value in self.named_values(self.x, self.buffers).items():
            if name in values:
                value.copy_(values[name])

    def _known_views(self, vector):
        """The same, made once for each vector."""
        key = id(vector)
        reference, views = self._views.get(key, _NOTHING)
        if reference is None or reference() is not vector:
            # Views of an alias: they must not keep the vector alive whose end removes them.
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
            out = tensors[0].new_zeros(self.dim)
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
        """Make large linear layers compute their weight's gradient in the memory where it is wanted."""
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
        if self.parameters[-1].data_ptr() != views[-1].data_ptr():  # otherwise they point there already
            for parameter, view in zip(self.parameters, views):
                parameter.data = view
        if buffers is not None:
            offset = 0
            for owner, key, _, shape in self._buffers:
                size = math.prod(shape)
                owner._buffers[key] = buffers[offset : offset + size].view(shape)
                offset += size

    @property
    def counters(self):
        """The tensors that the module holds as its integer buffers; clients have their own."""
        return [owner._buffers[key] for owner, key in self._integer_buffers]

    def point_counters_at(self, counters):
        """Make `counters` the integer buffers of the module, which it then changes in place."""
        for (owner, key), counter in zip(self._integer_buffers, counters):
            owner._buffers[key] = counter

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


def _lies_permuted(parameter, channels_last):
    """Whether a parameter lies in the vector in channels-last order; see `FlatModule`."""
    if parameter.dim() != 4:
        return False
    if channels_last is None:
        return not parameter.is_contiguous() and parameter.is_contiguous(memory_format=torch.channels_last)
    return channels_last


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
