"""How ranks communicate: the only room that imports MPI, besides what measures and checks it (bench, doctor)."""

from fedmpi.comm.shared_memory import check_shared_memory, remove_remains

remove_remains()
check_shared_memory()  # before any module of this room begins MPI
