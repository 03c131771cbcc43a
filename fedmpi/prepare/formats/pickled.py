"""The only pickled files that fedmpi reads: the batches of CIFAR-10's official Python version.

fedmpi itself pickles nothing. A pickle can name any function and have it called, so these files are read
with an unpickler that allows only the names that rebuild an array of numbers and refuses all others.
"""

import codecs
import io
import pickle

import numpy as np

from fedmpi.ground.errors import UserError

# The functions themselves, so that no module is imported because a file names it.
_ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("_codecs", "encode"): codecs.encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) not in _ALLOWED:
            raise UserError(f"refers to {module}.{name}, which a batch of CIFAR-10 does not need: refused as unsafe")
        return _ALLOWED[module, name]


def unpickle_batch(content, path):
    """A batch of the Python version in the layout of the binary version: records of a label and 3072 pixel values.

    `content`: bytes of data_batch_1 ... data_batch_5 or test_batch. `path`: of the file, for messages.

    Raises:
        UserError: if it is not such a batch, or refers to anything but arrays.
    """
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3072):
            raise UserError(f"data is {pixels.dtype}{list(pixels.shape)}: expected uint8 [{len(labels)}, 3072]")
        return np.column_stack([labels.astype(np.uint8), pixels]).tobytes()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # noqa: BLE001  a damaged pickle can raise anything
        raise UserError(f"{path}: cannot be read as a batch of CIFAR-10: {type(error).__name__}: {error}") from None
