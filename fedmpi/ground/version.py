"""Which version this is, and where it is installed."""

import pathlib

__version__ = "0.1.0"
PACKAGE = pathlib.Path(__file__).parents[1]  # the folder of fedmpi
