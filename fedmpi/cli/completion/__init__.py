"""Completion of the programs' options in a shell (``python -m fedmpi completion bash``)."""
