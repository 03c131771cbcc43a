"""Samples in memory as they are in the file, and the batches made of them on the device."""

import dataclasses
import functools
import inspect
import math

import numpy as np
import torch
from torch.nn import functional

from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import import_path
from fedmpi.ground.settings import LARGEST
from fedmpi.ground.text import short

EVALUATION_BATCH = 250  # samples; 1000 leave the cache: they took 1.5 times as long per sample on a small CNN


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Random shifts and mirror images, for the whole batch at once.

    It draws from torch's generator of the rows' device, which the oracle seeds for every draw, so that
    both gradients of a pair see the same batch.

    Attributes:
        crop_padding: an image is padded by this many black pixels and cropped at random to its own size.
        flip: whether to mirror images left to right, each with probability 1/2.
    """

    crop_padding: int
    flip: bool

    def apply(self, images):
        """[b, height, width, ...] the images, shifted and mirrored."""
        num_images, (height, width), edge = len(images), images.shape[1:3], self.crop_padding
        device = images.device
        variants = torch.cat([images, images.flip(2)]) if self.flip else images
        # One more line at the bottom: the run of memory of the last crop ends there.
        padded = functional.pad(variants, (*(0, 0) * (images.dim() - 3), edge, edge, edge, edge + 1))
        num_lines, line, values = padded.shape[1], padded.shape[2], math.prod(padded.shape[3:])
        variant = torch.randint(1 + self.flip, (num_images,), device=device)
        top, left = torch.randint(2 * edge + 1, (2, num_images), device=device)
        # A crop is copied as one run of memory, whole lines from its first pixel on, and then cut to its width.
        first = ((variant * num_images + torch.arange(num_images, device=device)) * num_lines + top) * line + left
        runs = padded.view(-1).unfold(0, height * line * values, 1).index_select(0, first * values)
        return runs.view(num_images, height, line, *padded.shape[3:])[:, :, :width]


class Transform:
    """A user's function of one training input, applied to each input of a batch, like those of torchvision.

    Args:
        path: dotted path of the function, of an object that can be called, or of a class that needs no arguments.

    Raises:
        UserError: if it cannot be imported or called.
    """

    def __init__(self, path):
        self._path = path
        try:
            self._function = import_path(path)
            if inspect.isclass(self._function):
                self._function = self._function()
        except Exception as error:  # noqa: BLE001  a user's module can raise anything
            raise UserError(f"task.transform = {path}: {type(error).__name__}: {short(error)}") from error
        if not callable(self._function):
            expected = f"expected a function, and this is a {type(self._function).__name__}"
            raise UserError(f"task.transform = {path}: {expected}")

    def __call__(self, inputs):
        """[b, ...] the inputs after the transform, each of the same shape as before.

        Raises:
            UserError: if the function fails, or returns something else.
        """
        try:
            changed = [self._function(row) for row in inputs]
        except Exception as error:  # noqa: BLE001
            raise UserError(f"task.transform = {self._path}: {type(error).__name__}: {short(error)}") from error
        for row in changed:
            if not isinstance(row, torch.Tensor) or row.shape != inputs.shape[1:] or not row.is_floating_point():
                found = f"{row.dtype} {list(row.shape)}" if isinstance(row, torch.Tensor) else f"a {type(row).__name__}"
                raise UserError(
                    f"task.transform = {self._path}: returned {found} for an input {list(inputs.shape[1:])}: expected "
                    "floats of the same shape"
                )
        return torch.stack(changed).to(inputs)


class Samples:
    """Rows of a data set in memory as they are in the file (uint8 images stay bytes).

    Args:
        rows: [n, ...] tensor; images are [n, height, width] or [n, height, width, channels].
        labels: [n] int64 tensor; on the CPU, as the rows, or both on the device.
        scale, shift: 0-d or [channels], on the device; an input is row * scale + shift.
        dtype: of the inputs; None: that of scale.
    """

    def __init__(self, rows, labels, scale, shift, dtype=None):
        self._dtype = dtype or scale.dtype
        self._rows, self.labels, self._scale, self._shift = rows, labels, scale, shift
        self._scale_number = scale.item() if scale.dim() == 0 else None
        self.num = len(labels)

    @classmethod
    def from_arrays(cls, rows, labels, mean, std, context):
        """Samples for the context's device, in its memory or the CPU's (`RankContext.device_of_data`).

        An input is (value - mean) / std, where bytes mean value/255.

        Args:
            rows: [n, ...] array, see `Samples`. labels: [n] int64 array.
            mean, std: sequences of one number, or one per channel. context: a `RankContext`.

        Raises:
            UserError: if an input is too large to compute with.
        """
        rows = torch.from_numpy(rows)
        per_value = 255.0 if rows.dtype == torch.uint8 else 1.0
        # What is stored in float64 would lose its differences in float32, like times in seconds since 1970.
        dtype = torch.float64 if rows.dtype == torch.float64 else context.dtype
        mean, std = (torch.tensor(values, dtype=dtype).squeeze() for values in (mean, std))
        scale, shift = 1 / (per_value * std), -mean / std
        _check_size(rows, scale, shift, context.dtype)
        labels = torch.from_numpy(labels)
        device = context.device_of_data(rows.nbytes + labels.nbytes)
        scale, shift = scale.to(context.device), shift.to(context.device)
        return cls(rows.to(device), labels.to(device), scale, shift, context.dtype)

    def at(self, indices, augmentation=None, transform=None):
        """(inputs, labels) at int64 `indices` [b], on the device; inputs of images are [b, channels, height, width].

        Args:
            indices: on the device of the rows, or on another one, which is slower.
            augmentation: an `Augmentation` or None. transform: after it, a `Transform` of inputs that are not yet
                normalised (bytes become numbers from 0 to 1), or None.
        """
        rows, labels = self._gather(self._rows, indices), self._gather(self.labels, indices)
        if augmentation:
            rows = augmentation.apply(rows)
        if transform is not None:
            per_value = 255 if rows.dtype == torch.uint8 else 1
            values = _channels_first(transform(_channels_first(rows.to(self._scale.dtype) / per_value)), back=True)
            return _channels_first(values.mul_(self._scale * per_value).add_(self._shift).to(self._dtype)), labels
        if self._scale_number is not None and rows.dtype == torch.uint8:
            inputs = torch.add(self._shift, rows, alpha=self._scale_number)  # also converts to float
        else:
            inputs = rows.to(self._scale.dtype).mul_(self._scale).add_(self._shift)
        return _channels_first(inputs.to(self._dtype)), labels

    def _gather(self, values, indices):
        """`values` at `indices`, on the device."""
        device, indices = self._scale.device, indices.to(values.device)
        if values.device == device:
            return values.index_select(0, indices)
        if device.type in ("cpu", "meta"):  # nothing to wait for
            return values.index_select(0, indices).to(device)
        pinned = torch.empty(len(indices), *values.shape[1:], dtype=values.dtype, pin_memory=True)
        torch.index_select(values, 0, indices, out=pinned)
        # The GPU still computes earlier steps: it copies meanwhile.
        backend = torch.get_device_module(device)
        computing, copying = backend.current_stream(device), _copy_stream(device)
        with backend.stream(copying):
            moved = pinned.to(device, non_blocking=True)
        computing.wait_stream(copying)
        moved.record_stream(computing)
        return moved

    def take(self, indices):
        """The `Samples` at an int64 array `indices`, in memory of their own."""
        chosen = torch.from_numpy(indices).to(self.labels.device)
        rows, labels = (part.index_select(0, chosen) for part in (self._rows, self.labels))
        return type(self)(rows, labels, self._scale, self._shift, self._dtype)

    def all(self):
        """(inputs, labels) of all samples, batch by batch, in order and without augmentation."""
        for start in range(0, self.num, EVALUATION_BATCH):
            indices = torch.arange(start, min(start + EVALUATION_BATCH, self.num), device=self.labels.device)
            yield self.at(indices)


@functools.cache
def _copy_stream(device):
    return torch.get_device_module(device).Stream(device)


def _channels_first(rows, back=False):
    """Images as models take them, [b, channels, height, width], of images as they are in a file; or `back`.

    Vectors stay as they are. Channels stay last in memory: faster convolutions.
    """
    if rows.dim() < 3:
        return rows
    if back:
        return rows.squeeze(1) if rows.shape[1] == 1 and rows.dim() == 4 else rows.movedim(1, -1)
    return rows.unsqueeze(1) if rows.dim() == 3 else rows.movedim(-1, 1)


def _check_size(rows, scale, shift, dtype):
    """Check that no input is so large that its square overflows: a first layer's sums would be infinite."""
    if not rows.numel():
        return
    by_channel = rows.reshape(-1, scale.numel()) if scale.dim() else rows.reshape(-1, 1)
    low, high = (torch.tensor([0]), torch.tensor([255])) if rows.dtype == torch.uint8 else by_channel.aminmax(dim=0)
    values = torch.stack([low, high]).double()
    inputs = values * scale.double() + shift.double()
    largest = float(inputs.abs().max())
    most = math.sqrt(torch.finfo(dtype).max)
    if not largest <= most:
        raise UserError(
            f"the samples: values from {float(values.min()):.4g} to {float(values.max()):.4g} are as large as "
            f"{largest:.4g} after normalisation with mean and std: expected at most {most:.2g}, so that their squares "
            f"fit into {dtype}"
        )


def input_shape(shape):
    """Shape of a model's input for samples of `shape`: [channels, height, width] of images, unchanged for vectors."""
    if len(shape) == 2:
        return (1, *shape)
    return (shape[-1], *shape[:-1]) if len(shape) > 2 else shape


def check_normalisation(mean, std, shape, prefix):
    """Check that mean and std fit samples of `shape`: one number, or one per channel; std > 0.

    Raises:
        UserError: one line that begins with `prefix`.
    """
    channels = shape[-1] if len(shape) != 2 else 1
    for name, values in (("mean", mean), ("std", std)):
        try:
            numbers = np.ravel(np.asarray(values, dtype=np.float64))
        except (TypeError, ValueError):
            numbers = np.array([np.nan])
        is_allowed = len(numbers) in (1, channels) and (abs(numbers) <= LARGEST).all()
        if not is_allowed or (name == "std" and min(numbers) <= 0):
            count = "1" if channels == 1 else f"1 or {channels}"
            kind = "numbers > 0" if name == "std" else "numbers"
            shown = short(list(values) if isinstance(values, tuple) else values)
            raise UserError(f"{prefix}{name} = {shown}: expected {count} {kind}")
