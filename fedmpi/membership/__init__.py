"""Opening and closing a federation on machines: what must be equal on all ranks."""
