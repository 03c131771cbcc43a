"""How ranks communicate: the only room that uses MPI, besides what measures and checks it (bench, doctor)."""
