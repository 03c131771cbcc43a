"""PMI-1, the protocol by which MPICH begins, where what the launcher says leads to errors or to a job that hangs."""

import contextlib
import os
import select
import socket
import stat
import threading

from fedmpi.comm.start.orphan import container

# SLURM (22.05) says that a value may have 1024 bytes, and reads no more of a request, which also has a key, at once.
# MPICH sends each rank's address with what lies behind it in memory, packed. Where this does not pack well, the
# requests are longer: the job ends with errors of mpi/pmi2, or hangs.
SHORT_VALUES = b"vallen_max=1024", b"vallen_max=512"


@contextlib.contextmanager
def corrected():
    """A context in which MPI begins, and in which a thread changes what the launcher says to MPICH if it must."""
    number, change = os.environ.get("PMI_FD", ""), _change()
    if not change or not number.isdigit() or not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
        yield
        return
    launcher, (near, far) = socket.socket(fileno=os.dup(int(number))), socket.socketpair()
    os.dup2(far.fileno(), int(number))
    thread = threading.Thread(target=_pass_on, args=(near, launcher, *change), name="PMI", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.dup2(launcher.fileno(), int(number))
        far.close()  # the last of its side: the thread ends
        thread.join()
        near.close()
        launcher.close()


def _change():
    """(what the launcher says, what MPICH hears instead); None if MPICH may hear all.

    MPICH's launcher names a job by its process, the second and the machine, and MPICH its shared memory by that. Two
    containers of a pod share the machine's name and /dev/shm, and count processes anew: jobs that begin in both within
    a second have one name, and hang. So the container's number becomes a part of it.
    """
    if "MPI_LOCALNRANKS" not in os.environ:
        return SHORT_VALUES if "SLURM_STEP_ID" in os.environ else None
    if os.environ["MPI_LOCALNRANKS"] == os.environ.get("PMI_SIZE") and (number := container()):
        return b"kvsname=kvs_", f"kvsname=kvs_{number}_".encode()
    return None


def _pass_on(near, launcher, said, heard):
    """Pass on what each of two sockets sends to the other, until one is closed."""
    with contextlib.suppress(OSError):
        while True:
            for sender in select.select((near, launcher), (), ())[0]:
                if not (data := sender.recv(1 << 16)):
                    raise ConnectionError
                if sender is launcher:
                    near.sendall(data.replace(said, heard))
                else:
                    launcher.sendall(data.replace(heard, said))
    with contextlib.suppress(OSError):
        near.shutdown(socket.SHUT_RDWR)  # MPICH learns that the launcher has ended
