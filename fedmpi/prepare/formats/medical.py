"""Slices and volumes of DICOM (pydicom) and NIfTI (nibabel)."""

import io
import math
import re
import zlib

import numpy as np

from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.limits import PIECE, check_file, check_unpacked

ENDINGS = (".dcm", ".nii", ".nii.gz")
DEFLATED, HEADER = b"1.2.840.10008.1.2.1.99", 4096  # how the rest of a file is compressed; bytes of its header
NUMBERED = re.compile(r"[^.:]*|[\d.]+")  # names that scanners give, like IM0001 and 1.2.840.10008


def is_medical(file):
    """Whether a file is DICOM or NIfTI by its name, or DICOM by its content."""
    if file.name.lower().endswith(ENDINGS) or not NUMBERED.fullmatch(file.name) or not file.is_file():
        return file.name.lower().endswith(ENDINGS)
    with file.open("rb") as content:
        content.seek(128)
        return content.read(4) == b"DICM"


def read(file):
    """(pixels, mode) of a file: float32 [h, w], [h, w, 3], [d, h, w, 1] of several frames, or [x, y, z, 1] of NIfTI.

    DICOM's values are those that its modality means, such as Hounsfield units; a bright pixel has a large value. The
    axes of NIfTI go to the right, to the front and upwards (RAS), whatever their order in the file. The mode says what
    must be the same in all files.

    Raises:
        UserError: if it cannot be read, or its library is missing.
    """
    try:
        import nibabel
        import pydicom
    except ImportError as error:
        raise UserError(f"{file}: needs another package: pip install 'fedmpi[formats]' ({error})") from None
    with attempt("read as DICOM or NIfTI", file, Exception):
        check_file(file)
        packed = file.stat().st_size
        if not file.name.lower().endswith(ENDINGS[1:]):
            encoded = file.read_bytes()
            _check_deflated(file, encoded)
            content = pydicom.dcmread(io.BytesIO(encoded))
            counts = [int(content.get(key, 1)) for key in ("NumberOfFrames", "SamplesPerPixel", "Rows", "Columns")]
            check_unpacked(file, math.prod(counts) * int(content.get("BitsAllocated", 8)) // 8, packed)
            kind, pixels = content.PhotometricInterpretation, content.pixel_array
            pixels = pydicom.pixels.apply_modality_lut(pixels, content).astype(np.float32)
            if kind == "MONOCHROME1":  # small values are bright
                pixels = pixels.max() + pixels.min() - pixels
            frames = int(content.get("NumberOfFrames", 1)) > 1 and pixels.ndim == 3
            kind = "MONOCHROME" if kind.startswith("MONOCHROME") else kind
            return (pixels[..., None] if frames else pixels), f"DICOM {kind}"
        volume = nibabel.load(file)
        check_unpacked(file, math.prod(map(int, volume.shape)) * 4, packed)
        volume = nibabel.as_closest_canonical(volume)
        pixels = volume.get_fdata(dtype=np.float32)
    if pixels.ndim not in (2, 3):
        raise UserError(f"{file}: is {list(pixels.shape)}: expected a slice or a volume, without time")
    return (pixels[..., None] if pixels.ndim == 3 else pixels), "NIfTI"


def _check_deflated(file, encoded):
    """Check the size of a DICOM file that is compressed as a whole, which pydicom unpacks at once."""
    if DEFLATED not in encoded[:HEADER]:
        return
    length = int.from_bytes(encoded[140:144], "little")  # of the rest of the header, which is not compressed
    unpacking, size, rest = zlib.decompressobj(-zlib.MAX_WBITS), 0, encoded[144 + length :]
    while rest and not unpacking.eof:
        size += len(unpacking.decompress(rest, PIECE))
        check_unpacked(file, size, len(encoded))
        rest = unpacking.unconsumed_tail
