"""SLURM's side of PMI-1, the protocol by which MPICH begins under ``srun --mpi=pmi2``."""

import contextlib
import os
import select
import socket
import threading

# SLURM (22.05) says that a value may have 1024 bytes, and reads no more of a request, which also has a key, at once.
SAID, KEPT = b"vallen_max=1024", b"vallen_max=512"


@contextlib.contextmanager
def short_values():
    """A context in which MPI begins, and in which MPICH sends no request that SLURM cuts.

    MPICH sends each rank's address with what lies behind it in memory, packed. Where this does not pack well, the
    requests are longer than SLURM reads: the job ends with errors of mpi/pmi2, or hangs. Here a thread passes on what
    both say, until MPI has begun, and says a smaller limit to MPICH.
    """
    number = os.environ.get("PMI_FD", "")
    if "SLURM_STEP_ID" not in os.environ or "MPI_LOCALNRANKS" in os.environ or not number.isdigit():
        yield
        return
    slurm, (near, far) = socket.socket(fileno=os.dup(int(number))), socket.socketpair()
    os.dup2(far.fileno(), int(number))
    thread = threading.Thread(target=_pass_on, args=(near, slurm), name="PMI", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.dup2(slurm.fileno(), int(number))
        far.close()  # the last of its side: the thread ends
        thread.join()
        near.close()
        slurm.close()


def _pass_on(near, slurm):
    """Pass on what each of two sockets sends to the other, until one is closed."""
    while True:
        for sender in select.select((near, slurm), (), ())[0]:
            data = sender.recv(1 << 16)
            if not data:
                near.shutdown(socket.SHUT_RDWR)
                return
            (near if sender is slurm else slurm).sendall(data.replace(SAID, KEPT))
