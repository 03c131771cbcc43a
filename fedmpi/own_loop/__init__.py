"""Federation in the user's own training loop: `fedmpi.join` and `fedmpi.average`."""
