"""The programs: ``fedmpi COMMAND``."""
