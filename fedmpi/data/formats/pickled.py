"""The one foreign format that is pickled: CIFAR-10's official Python version.

fedmpi pickles nothing itself. A pickle can name any function and have it called, so these are read
with an unpickler that knows four names, those that rebuild an array of numbers, and refuses the rest.
"""

import codecs
import io
import pickle

import numpy as np

from fedmpi.errors import UserError

# Given, not imported, so that no module's code runs on the word of a file.
_KNOWN = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("_codecs", "encode"): codecs.encode,
}


class _OnlyArrays(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) not in _KNOWN:
            raise UserError(f"asks for {module}.{name}, which a batch of CIFAR-10 does not need: it is not read")
        return _KNOWN[module, name]


def cifar10_records(content, path):
    """A batch of the Python version in the form of the binary version.

    Args:
        content: bytes of data_batch_1 ... data_batch_5 or test_batch. path: of it, for messages.

    Returns:
        bytes: records of a label and 3072 pixel values.

    Raises:
        UserError: if it is not such a batch, or names anything but arrays.
    """
    try:
        batch = _OnlyArrays(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3072):
            raise UserError(f"holds data {pixels.dtype}{list(pixels.shape)}: expected uint8 [{len(labels)}, 3072]")
        return np.column_stack([labels.astype(np.uint8), pixels]).tobytes()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # noqa: BLE001  a damaged pickle can raise anything
        raise UserError(f"{path}: cannot be read as a batch of CIFAR-10: {type(error).__name__}: {error}") from None
