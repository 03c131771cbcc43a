"""How a process begins as a rank: the launcher, MPI, shared memory, and what watches over it."""
