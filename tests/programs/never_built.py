"""A model that is never built: by STUCK a call of C that lets no other thread of Python run ("in C"), or a sleep."""

import ctypes
import os
import pathlib
import time


def model(shape, num_classes):
    """Write a file into the folder STUCK_IN, and wait."""
    pathlib.Path(os.environ["STUCK_IN"], f"stuck-{os.getpid()}").touch()
    if os.environ["STUCK"] == "in C":
        ctypes.PyDLL(None).sleep(100)
    time.sleep(100)
