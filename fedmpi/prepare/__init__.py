"""From tables, images, texts and official archives to HDF5 files: ``fedmpi data``."""
