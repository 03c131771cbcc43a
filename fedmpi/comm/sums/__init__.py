"""The sums over ranks: MPI, transports, windows, slices."""
