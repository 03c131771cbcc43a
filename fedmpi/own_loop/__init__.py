"""Federation in somebody's own training loop: `fedmpi.join` and `fedmpi.average`."""
