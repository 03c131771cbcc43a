"""Slices and volumes of DICOM (pydicom) and NIfTI (nibabel)."""

import io
import re

import numpy as np

from fedmpi.errors import UserError, attempt

ENDINGS = (".dcm", ".nii", ".nii.gz")
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
        if not file.name.lower().endswith(ENDINGS[1:]):
            content = pydicom.dcmread(io.BytesIO(file.read_bytes()))
            kind, pixels = content.PhotometricInterpretation, content.pixel_array
            pixels = pydicom.pixels.apply_modality_lut(pixels, content).astype(np.float32)
            if kind == "MONOCHROME1":  # small values are bright
                pixels = pixels.max() + pixels.min() - pixels
            frames = int(content.get("NumberOfFrames", 1)) > 1 and pixels.ndim == 3
            kind = "MONOCHROME" if kind.startswith("MONOCHROME") else kind
            return (pixels[..., None] if frames else pixels), f"DICOM {kind}"
        volume = nibabel.as_closest_canonical(nibabel.load(file))
        pixels = volume.get_fdata(dtype=np.float32)
    if pixels.ndim not in (2, 3):
        raise UserError(f"{file}: is {list(pixels.shape)}: expected a slice or a volume, without time")
    return (pixels[..., None] if pixels.ndim == 3 else pixels), "NIfTI"
