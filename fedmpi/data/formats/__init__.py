"""Data sets in the forms in which people have them, read for `fedmpi.data.prepare`."""
