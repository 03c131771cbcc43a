"""Flat buffers: a module's parameters as views of one vector, a rank's state as rows of one matrix."""

import functools
import itertools
import math
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from fedmpi.ground.errors import UserError
from fedmpi.oracles.architecture import describe

Tensors = list[torch.Tensor]
HALVES = (torch.bfloat16, torch.float16)
LARGE_LAYER = 1 << 18  # weights; in smaller layers, the copy of the gradient takes no measurable time


def give_own_memory(module: nn.Module) -> None:
    """Let each element of a module's tensors have its own memory: those of `expand` and `unfold` share it."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not is_lazy(tensor) and not tensor.is_contiguous():
            tensor.data = tensor.data.clone()


class FlatModule:
    """A module whose trainable parameters can be pointed at any vector of their total length.

    Evaluating the module at a vector costs no copy: the parameters become views of it. Float
    buffers (batch-norm statistics) are views of a second, short vector in the same way; those of another dtype lie
    there as bits. Integer and complex buffers and frozen parameters stay where they are.

    Args:
        module: a `torch.nn.Module`; taken over, its parameters are re-homed.
        channels_last: whether 4-d weights lie in the vector in channels-last order, so that
            convolutions read and write them without converting; None: each as it lies now.
        direct_gradients: whether large linear layers compute the gradient of their weights where
            `gradient` is to put it. The product is the same; it may round differently.
        alignment: each parameter begins at a multiple of so many elements; what lies between them is 0.
        has_masters: whether parameters may be of 16 bits. They keep memory of their own, with the rounded values of a
            float32 vector: the masters.

    Attributes:
        dim: d, the number of trainable parameters and of the elements between them.
        num_buffers: number of elements of the vector of all float buffers.
        buffer_parts: [`BufferPart`] of it. frozen_parts: modules that stay in evaluation mode, see `train`.
        architecture: what the module was at the beginning, see `fedmpi.oracles.architecture.describe`.
        changed_by, remedy: for the message when the module has other parameters than at the beginning.
        x: [dim] the initial parameters; buffers: [num_buffers] the initial float buffers.
        names, shapes, segments: of the parameter tensors; a segment is a slice of a [dim] vector.
        unused: names of the parameters that the last incomplete gradient did not depend on; theirs is 0.
        permuted: for each parameter tensor, whether it lies in a vector in channels-last order.

    Raises:
        UserError: if the module has no trainable parameter, or they cannot lie in one vector.
    """

    changed_by = "a pass"
    remedy = "expected the same parameters and buffers in all passes (parameters may be frozen later)"

    def __init__(
        self,
        module: nn.Module,
        channels_last: bool | None = False,
        direct_gradients: bool = True,
        alignment: int = 1,
        has_masters: bool = False,
    ) -> None:
        self.module = module
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise UserError(f"model {type(module).__name__} has no trainable parameter")
        self._dtype = _common_dtype([p for _, p in named], has_masters)  # before anything is converted
        give_own_memory(module)
        self._views: dict[int, _Known] = {}  # id of a row -> what `_known` makes of it
        self._buffer_homes: dict[int, _Known] = {}  # id of a vector of buffers -> the same
        self._large_layers: list[int] = []  # positions of their weights in `parameters`
        # (large layer, its forward while a gradient is computed)
        self._redirected: list[tuple[nn.Linear, Callable[..., torch.Tensor]]] = []
        self.architecture = describe(module)
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self._rounded = {  # position -> memory of its own, of the parameters that are no views of the vector
            position: p.data.clone() for position, p in enumerate(self.parameters) if p.dtype != self._dtype
        }
        self.unused: list[str] = []
        self._entries, self._structure = _trained_entries(module), _structure(module)
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self.frozen_parts = [part for part in module.modules() if _is_frozen(part)]
        self.shapes = [tuple(p.shape) for p in self.parameters]
        self._sizes = [-(-p.numel() // alignment) * alignment for p in self.parameters]  # each with its padding
        self.permuted = [_lies_permuted(p, channels_last) for p in self.parameters]
        self.dim = sum(self._sizes)
        begins = [end - size for end, size in zip(itertools.accumulate(self._sizes), self._sizes)]
        self.segments = [slice(begin, begin + p.numel()) for begin, p in zip(begins, self.parameters)]
        self._buffers, num_buffers = _lay_out_buffers(module, self._dtype)
        self._given_buffers = [buffer.owner._buffers[buffer.key] for buffer in self._buffers]
        self._integer_buffers = [
            (owner, key)
            for owner in module.modules()
            for key, buffer in owner.named_buffers(recurse=False)
            if not buffer.is_floating_point()
        ]
        self.x = self.flatten(self.parameters)
        self.buffers, self.num_buffers = self.x.new_zeros(num_buffers), num_buffers
        for buffer in self._buffers:
            self._buffer_view(buffer, self.buffers).copy_(buffer.owner._buffers[buffer.key])
        self.point_at(self.x, self.buffers)
        self._wanted: dict[int, torch.Tensor] = {}  # while a gradient is computed: position -> where it is wanted
        if direct_gradients:
            self._find_large_layers()

    def views(self, vector: torch.Tensor) -> Tensors:
        """The parameter-shaped views of a [dim] vector, in the order of `names`."""
        views = []
        for piece, shape, permuted in zip(vector.split(self._sizes), self.shapes, self.permuted):
            piece = piece[: math.prod(shape)]  # without padding
            if permuted:
                out_channels, in_channels, height, width = shape
                views.append(piece.view(out_channels, height, width, in_channels).permute(0, 3, 1, 2))
            else:
                views.append(piece.view(shape))
        return views

    @torch.no_grad()
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take other initial parameters and buffers: name -> tensor as in `named_values`; missing buffers stay."""
        for name, value in self.named_values(self.x, self.buffers).items():
            if name in values:
                value.copy_(values[name])

    @property
    def buffer_parts(self) -> list["BufferPart"]:
        """[`BufferPart`] of every float buffer; one that modules share has its first name."""
        found: dict[tuple[int, int], BufferPart] = {}
        for buffer in self._buffers:
            found.setdefault((buffer.part.offset, buffer.part.numel), buffer.part)
        return list(found.values())

    @property
    def buffer_slices(self) -> dict[str, slice]:
        """Name -> slice of `buffers` of every float buffer."""
        return {buffer.part.name: buffer.part.place(self.x.element_size()) for buffer in self._buffers}

    def train(self) -> None:
        """Put the module in training mode, but for frozen modules with statistics of their own: these stay the same."""
        self.module.train()
        for part in self.frozen_parts:
            part.training = False

    def _known_views(self, vector: torch.Tensor) -> Tensors:
        """What `views` returns, made once for each vector."""
        return self._known_at(vector).views

    def _known_at(self, vector: torch.Tensor) -> "_Known":
        return _known(self._views, vector, self.views, self._rounded)

    @property
    def has_masters(self) -> bool:
        """Whether some parameters have the rounded values of a vector, and do not lie in it."""
        return bool(self._rounded)

    @torch.no_grad()
    def flatten(self, tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
        """Parameter-shaped tensors, in the order of `names`, as one [dim] vector, `out` or new.

        Gradients of large layers that lie in `out` already stay there.
        """
        if out is None:
            out = tensors[0].new_zeros(self.dim, dtype=self._dtype)
        self._fill(self._known_views(out), tensors)
        return out

    def _fill(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        views, tensors = list(views), list(tensors)
        for position in sorted(self._large_layers, reverse=True):
            if views[position].data_ptr() == tensors[position].data_ptr():
                del views[position], tensors[position]
        if views:
            torch._foreach_copy_(views, tensors)

    def gradient(self, loss_of: Callable[[nn.Module], torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """The loss `loss_of(module)` at the current parameters, without a graph; its gradient goes into `out`."""
        views = self._known_views(out)
        self._wanted = {position: views[position] for position in self._large_layers}
        redirected = [(layer, forward) for layer, forward in self._redirected if "forward" not in vars(layer)]
        try:
            for layer, forward in redirected:
                vars(layer)["forward"] = forward
            loss = loss_of(self.module)
            trained = [p for p in self.parameters if p.requires_grad]  # the module may freeze some in its pass
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        finally:
            self._wanted = {}
            for layer, _ in redirected:  # the user's layers are changed for this call only
                vars(layer).pop("forward", None)
        if any(g is None or g.is_sparse for g in gradients) or len(gradients) < len(views):
            views, gradients = self._dense(views, gradients)
        self._fill(views, gradients)
        self.adopt()
        return loss.detach()

    def _dense(self, views: Tensors, gradients: Sequence[torch.Tensor | None]) -> tuple[Tensors, Tensors]:
        """(views, gradients) of all parameters: sparse gradients as dense ones, 0 where there is none."""
        found, self.unused = iter(gradients), []
        dense = []
        for name, parameter, view in zip(self.names, self.parameters, views):
            gradient = next(found) if parameter.requires_grad else None
            if gradient is None:
                self.unused.append(name)
                gradient = torch.zeros_like(view)
            dense.append(gradient.to_dense() if gradient.is_sparse else gradient)
        return views, dense

    def _find_large_layers(self) -> None:
        """Find the linear layers whose weights' gradients `gradient` computes in the memory where they are wanted."""
        positions = {id(parameter): position for position, parameter in enumerate(self.parameters)}
        for layer in self.module.modules():
            weight = getattr(layer, "weight", None)
            is_plain = type(layer) is nn.Linear and "forward" not in vars(layer)
            if is_plain and weight is not None and id(weight) in positions and weight.numel() >= LARGE_LAYER:
                self._large_layers.append(positions[id(weight)])
                self._redirected.append((layer, functools.partial(self._linear, layer, positions[id(weight)])))

    def _linear(self, layer: nn.Linear, position: int, inputs: torch.Tensor) -> torch.Tensor:
        # A weight that is used twice goes the usual way the second time: its gradient is a sum.
        wanted = self._wanted.pop(position, None) if torch.is_grad_enabled() else None
        if wanted is None or torch.is_autocast_enabled(inputs.device.type):
            return functional.linear(inputs, layer.weight, layer.bias)
        return _LinearInto.apply(inputs, layer.weight, layer.bias, wanted)

    def point_at(self, vector: torch.Tensor, buffers: torch.Tensor | None = None) -> None:
        """Make the parameters views of `vector` [dim] and, if given, the float buffers of `buffers` [num_buffers].

        Each gets a storage of its own in that memory, see `alone`: files of the model contain no more than the model.
        """
        self._at = self._known_at(vector)  # where the parameters are now; `adopt` copies strays back
        if [parameter.data_ptr() for parameter in self.parameters] != self._at.pointers:
            for parameter, home, pointer in zip(self.parameters, self._at.homes(), self._at.pointers):
                if parameter.data_ptr() != pointer:
                    parameter.data = home
        if self._rounded:
            views = [self._at.views[position] for position in self._rounded]
            torch._foreach_copy_([*self._rounded.values()], views)
        torch.clear_autocast_cache()  # it has casts of the values of before, if this is within the user's autocast
        if buffers is not None:
            self._buffers_at = _known(self._buffer_homes, buffers, self._buffer_views)
            for buffer, home in zip(self._buffers, self._buffers_at.homes()):
                buffer.owner._buffers[buffer.key] = home.data  # an alias: the module may set its .data

    def _buffer_views(self, buffers: torch.Tensor) -> Tensors:
        return [self._buffer_view(buffer, buffers) for buffer in self._buffers]

    @torch.no_grad()
    def release(self, vector: torch.Tensor, buffers: torch.Tensor) -> None:
        """Give the module these values in memory of its own, and as buffers the very tensors that it had before."""
        self.point_at(vector, buffers)
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()
        for buffer, tensor in zip(self._buffers, self._given_buffers):
            tensor.copy_(buffer.owner._buffers[buffer.key])
            buffer.owner._buffers[buffer.key] = tensor

    def _buffer_view(self, buffer: "_Buffer", buffers: torch.Tensor) -> torch.Tensor:
        if buffer.part.dtype == self.x.dtype:  # the vector may be of another dtype, after a conversion
            return buffers[buffer.part.place(self.x.element_size())].view(buffer.shape)
        return buffer.part.of(buffers).view(buffer.shape)

    def adopt(self) -> None:
        """Copy into the vectors what a pass or a loop has assigned to other memory.

        A module may assign a new tensor to a buffer, ``self.ema = 0.9 * self.ema + ...``, or to the ``.data`` of a
        parameter. Its values are copied to the vectors that the module was pointed at, and it is pointed there again.

        Raises:
            UserError: if the new tensor has another shape, or that of a parameter another dtype.
        """
        pointers = [parameter.data_ptr() for parameter in self.parameters]
        if pointers != self._at.pointers or not all(map(_is_at, self._buffers, self._buffers_at.pointers)):
            self._adopt_strays()
        for position, value in self._rounded.items():
            _take_changes(self._at.views[position], value)

    @torch.no_grad()
    def _adopt_strays(self) -> None:
        strays, parts = [], [buffer.part.name for buffer in self._buffers]
        self._check_not_moved(self.names, self._at)
        self._check_not_moved(parts, self._buffers_at)
        for name, parameter, home, pointer in zip(self.names, self.parameters, self._at.homes(), self._at.pointers):
            if parameter.data_ptr() != pointer:
                strays.append((home.data, self._stray(name, parameter.data, home, home.dtype)))
                parameter.data = home
        for buffer, view, home in zip(self._buffers, self._buffers_at.views, self._buffers_at.homes()):
            if not _is_at(buffer, view.data_ptr()):
                current = getattr(buffer.owner, buffer.key, None)
                if buffer.is_cache and current is not None and current.shape != view.shape:
                    continue  # no state of the model: a table that grows with its inputs
                strays.append((view, self._stray(buffer.part.name, current, view)))
                buffer.owner._buffers[buffer.key] = home.data
        for view, value in strays:
            view.copy_(value)

    def _check_not_moved(self, names: Sequence[str], known: "_Known") -> None:
        """Raise UserError if torch has moved memory that the module has been given, in place."""
        for name, home, pointer in zip(names, known.homes(), known.pointers):
            if home.data_ptr() != pointer:
                raise UserError(
                    f"model {type(self.module).__name__}: '{name}' was moved by share_memory(), or because it was sent "
                    "to another process: send copies, like {name: value.clone() for name, value in "
                    "model.state_dict().items()}"
                )

    def _stray(
        self, name: str, value: torch.Tensor | None, view: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A copy of a value that the module has put somewhere else: maybe where another one belongs, as in a swap.

        `dtype`: that it must have; None: it is converted.
        """
        shape = None if value is None else list(value.shape)
        if value is None or shape != list(view.shape):
            raise self._changed(f"gives '{name}' the shape {shape}: expected {list(view.shape)}")
        if dtype not in (None, value.dtype):
            raise self._changed(f"gives '{name}' the type {value.dtype}: expected {dtype}")
        return value.clone()

    def check(self) -> None:
        """Check that the module has the same parameters and persistent buffers as at the beginning, none unfrozen.

        Usually this compares a few numbers for each of its parts.

        Raises:
            UserError: with the first entry that is not as it was when the vectors were laid out.
        """
        is_same = all(_contents(part) == known for part, known in self._structure)
        if is_same and not any(p.requires_grad for p in self._frozen):
            return
        before, now = self._entries, _trained_entries(self.module)
        found = dict(self.module.named_parameters())
        pairs = {
            "adds": (name for name in now if name not in before),
            "removes": (name for name in before if name not in now),
            "unfreezes": (name for name, is_trained in now.items() if is_trained and not before.get(name)),
            "puts another object in the place of parameter": (
                name for name, parameter in zip(self.names, self.parameters) if found.get(name) is not parameter
            ),
        }
        for verb, names in pairs.items():
            for name in names:
                raise self._changed(f"{verb} '{name}' after the vector of its parameters is made")
        self._structure = _structure(self.module)

    def _changed(self, change: str) -> UserError:
        return UserError(f"model {type(self.module).__name__}: {self.changed_by} {change}: {self.remedy}")

    @property
    def counters(self) -> Tensors:
        """The tensors that the module holds as its integer buffers; clients have their own."""
        return [owner._buffers[key] for owner, key in self._integer_buffers]

    def point_counters_at(self, counters: Sequence[torch.Tensor]) -> None:
        """Make `counters` the integer buffers of the module, which it then changes in place."""
        for (owner, key), counter in zip(self._integer_buffers, counters):
            owner._buffers[key] = counter

    def named_views(self, vector: torch.Tensor, buffers: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> view of the parameters in `vector` [dim] and of the float buffers in `buffers`.

        The module itself stays as it is: this is for `torch.func.functional_call`.
        """
        values = dict(zip(self.names, self.views(vector)))
        values.update({buffer.part.name: self._buffer_view(buffer, buffers) for buffer in self._buffers})
        return values

    def named_values(self, vector: torch.Tensor, buffers: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> tensor (views) of all parameters at `vector` and all buffers at `buffers`.

        The keys and shapes are those of the module's own `state_dict()`.
        """
        self.point_at(vector, buffers)
        values: dict[str, torch.Tensor] = self.module.state_dict()
        return values


class BufferPart(typing.NamedTuple):
    """A float buffer in the vector of all buffers, from `offset` on; one of another dtype lies there as bits."""

    name: str
    offset: int
    numel: int
    dtype: torch.dtype

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """[numel] its values in such a vector, a view."""
        size = vector.element_size()
        begin = self.offset * size // self.dtype.itemsize
        return vector.view(self.dtype)[begin : begin + self.numel]

    def place(self, size: int) -> slice:
        """Its slice of a vector whose elements have `size` bytes."""
        return slice(self.offset, self.offset - (-self.numel * self.dtype.itemsize // size))


class _Buffer(typing.NamedTuple):
    """Where a float buffer lies: in the module `owner` as `key`, in the vector of all buffers as `part`."""

    owner: nn.Module
    key: str
    shape: tuple[int, ...]
    is_cache: bool
    part: BufferPart


def _is_at(buffer: _Buffer, pointer: int) -> bool:
    """Whether the module has a buffer in the memory that begins there."""
    try:
        current = buffer.owner._buffers[buffer.key]
    except KeyError:  # it was deleted
        return False
    return current is not None and current.data_ptr() == pointer


def _lay_out_buffers(module: nn.Module, dtype: torch.dtype) -> tuple[list[_Buffer], int]:
    """([`_Buffer`] of every float buffer, length of a vector of `dtype` for them); modules may share a buffer.

    Those of another dtype come last.
    """
    places = [
        (f"{prefix}.{key}" if prefix else key, owner, key, buffer)
        for prefix, owner in module.named_modules()
        for key, buffer in owner.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.is_floating_point()
    ]
    found, offsets, end = [], {}, 0
    for name, owner, key, buffer in sorted(places, key=lambda place: place[-1].dtype != dtype):
        if id(buffer) not in offsets:
            unit = 1 if buffer.dtype == dtype else 8 // dtype.itemsize  # bits of others begin and end at 8 bytes
            offsets[id(buffer)] = begin = -(-end // unit) * unit
            end = begin - (-buffer.nbytes // (unit * dtype.itemsize)) * unit
        part = BufferPart(name, offsets[id(buffer)], buffer.numel(), buffer.dtype)
        is_cache = key in owner._non_persistent_buffers_set
        found.append(_Buffer(owner, key, tuple(buffer.shape), is_cache, part))
    has_others = any(buffer.part.dtype != dtype for buffer in found)
    return found, end + (end * dtype.itemsize % 8 // dtype.itemsize if has_others else 0)


class _Known:
    """The views of a vector that is in use, and where they are.

    Attributes:
        reference: weak, to the vector. views: tensors. pointers: where the module's tensors begin: the views, or
            what is given in the place of some (position -> tensor).
    """

    def __init__(
        self, reference: "weakref.ref[torch.Tensor]", views: Tensors, others: Mapping[int, torch.Tensor]
    ) -> None:
        self.reference, self.views = reference, views
        self._given = [others.get(position, view) for position, view in enumerate(views)]
        self.pointers = [tensor.data_ptr() for tensor in self._given]
        self._homes: Tensors | None = None

    def homes(self) -> Tensors:
        """The module's tensors, each with a storage of its own; a buffer that modules share remains one tensor."""
        if self._homes is None:
            keys = [(pointer, tensor.dtype, tensor.shape) for pointer, tensor in zip(self.pointers, self._given)]
            known = {key: alone(tensor) for key, tensor in dict(zip(keys, self._given)).items()}
            self._homes = [known[key] for key in keys]
        return self._homes


def _known(
    vectors: dict[int, _Known],
    vector: torch.Tensor,
    views_of: Callable[[torch.Tensor], Tensors],
    others: Mapping[int, torch.Tensor] | None = None,
) -> _Known:
    """The `_Known` of a vector, made once; `vectors` has those that are in use by their ids."""
    key = id(vector)
    known = vectors.get(key)
    if known is None or known.reference() is not vector:
        # Views of an alias: they must not keep the vector alive whose end removes them.
        reference = weakref.ref(vector, lambda _: vectors.pop(key, None))
        known = vectors[key] = _Known(reference, views_of(vector.data), others or {})
    return known


def alone(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own.

    Of a storage that is larger than its tensor, torch.save, pickle and deepcopy take all, and safetensors refuses it;
    torch.save refuses one that tensors of two dtypes view.
    """
    try:
        return torch.from_dlpack(view)
    except (BufferError, RuntimeError, TypeError, ValueError):
        pass
    try:  # float8
        return torch.from_dlpack(view.view(torch.uint8)).view(view.dtype)
    except (BufferError, RuntimeError, TypeError, ValueError):  # without memory
        return view


def _take_changes(masters: torch.Tensor, rounded: torch.Tensor) -> None:
    """Copy into a float32 tensor what is not its rounded value: where nothing was changed, its digits stay."""
    is_changed = rounded != masters.to(rounded.dtype)
    masters.copy_(torch.where(is_changed, rounded.to(masters.dtype), masters))


def _common_dtype(parameters: Sequence[torch.Tensor], has_masters: bool) -> torch.dtype:
    """The type of a vector of the parameters.

    Raises:
        UserError: if they cannot lie in one.
    """
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters if not is_lazy(parameter)}
    allowed = {torch.float32 if has_masters and dtype in HALVES else dtype for dtype, _ in kinds}
    devices = {device for _, device in kinds}
    if len(allowed) > 1 or len(devices) > 1 or not allowed <= {torch.float32, torch.float64}:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise UserError(
            f"the trainable parameters are {found}: expected all of them in float32 or float64 and on one device "
            "(torch.autocast computes in bfloat16 with parameters in float32)"
        )
    return allowed.pop() if allowed else torch.float32


def odd_kind(tensor: torch.Tensor) -> str | None:
    """Why a parameter or buffer cannot be part of a vector, as text; None if it can, or has no shape yet."""
    if is_lazy(tensor):
        return None
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # DTensors of FSDP, for example
        return f"a {type(tensor).__name__}, which other code keeps in pieces or in another form"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return "sparse"
    if tensor.is_complex():
        return f"complex ({tensor.dtype})"
    return "on the device meta, without values" if tensor.is_meta else None


def check_whole(module: nn.Module) -> None:
    """Check that a module's parameters lie in this process as a whole: FSDP keeps pieces of them.

    Raises:
        UserError: one line, if they do not.
    """
    for name, part in module.named_modules():
        kinds = {cls.__name__ for cls in type(part).__mro__}
        if sharded := kinds & {"FSDPModule", "FullyShardedDataParallel"}:
            where = f"its part '{name}'" if name else "it"
            raise UserError(
                f"model {type(module).__name__}: {where} is sharded by FSDP ({sharded.pop()}), so that this process "
                "has a piece of each parameter: expected whole parameters; leave FSDP out"
            )


def _is_frozen(part: nn.Module) -> bool:
    """Whether a module has float buffers and parameters of its own, and all of these are frozen."""
    parameters = list(part.parameters(recurse=False))
    floats = any(buffer.is_floating_point() for buffer in part.buffers(recurse=False))
    return floats and bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _contents(part: nn.Module) -> list[int | str]:
    """What says that a module has other parameters, parts or buffers than before: numbers and names."""
    found: list[int | str] = [*map(id, part._parameters.values())]
    if part._modules:
        found += map(id, part._modules.values())
    if part._buffers:
        found += part._buffers.keys()
    return found


def _structure(module: nn.Module) -> list[tuple[nn.Module, list[int | str]]]:
    return [(part, _contents(part)) for part in module.modules()]


def _trained_entries(module: nn.Module) -> dict[str, bool]:
    """Name -> whether it is trained, of all entries of the state dict."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {name: name in trained for name in [*module.state_dict(), *trained]}


def _lies_permuted(parameter: torch.Tensor, channels_last: bool | None) -> bool:
    """Whether a parameter lies in the vector in channels-last order; see `FlatModule`."""
    if parameter.dim() != 4:
        return False
    if channels_last is None:
        return not parameter.is_contiguous() and parameter.is_contiguous(memory_format=torch.channels_last)
    return channels_last


class _LinearInto(torch.autograd.Function):
    """`functional.linear` whose weight gradient is computed in given memory and not copied there."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.wanted = wanted
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows, columns = gradient.reshape(-1, weight.shape[0]), inputs.reshape(-1, weight.shape[1])
        of_inputs = gradient @ weight if ctx.needs_input_grad[0] else None
        differentiable = torch.is_grad_enabled()  # a loss that contains gradients
        of_weight = rows.t() @ columns if differentiable else torch.mm(rows.t(), columns, out=ctx.wanted)
        return of_inputs, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None
