"""Files that fedmpi reads and writes: its own, HDF5, settings, checksums."""
