"""A loop of two steps on each rank, and what comes before it: python begins.py HOW [SECONDS [CODE [LATE]]]."""

import os
import sys
import time

NUMBER = int(next((os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ), "0"))


def main(how="", seconds="30", code="0", late="0"):
    if how == "leaves" and NUMBER == 1:
        sys.exit(int(code))
    if how == "leaves" and NUMBER == 2:
        time.sleep(float(late))
    if how == "late" and NUMBER == 0:
        time.sleep(float(seconds) / 10)
    if how == "without":
        from fedmpi.comm.start.mpi_library import begin

        time.sleep(1000) if NUMBER == 1 else begin(float(seconds))
    if how == "rc":
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI  # noqa: F401
    if how == "ranks":  # without torch, which takes long where there are many
        from fedmpi.comm.start.mpi_library import MPI as library

        world = library.COMM_WORLD
        world.Barrier()
        print(f"{world.size} ranks", *(os.listdir("/dev/shm") if world.rank == 0 else ()))
        world.Barrier()
        return
    import torch

    import fedmpi

    model = torch.nn.Linear(2, 1)
    fed = fedmpi.average(model, every=1, timeout=float(seconds))
    if how == "fork" and os.fork() == 0:
        raise ValueError("in the child")
    for _ in range(2):
        fed.step()
    if how == "trains":
        os.write(1, b"trains\n")  # at once: of two ranks, lines do not mix
        while True:
            fed.step()
            time.sleep(0.01)
    fed.finish()
    print(f"done {fed._link.size}")


if __name__ == "__main__":
    main(*sys.argv[1:])
