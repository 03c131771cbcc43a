"""What this process can use of its machine; without MPI."""
