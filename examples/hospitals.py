"""Three hospitals with a table each: a common model, and one whose last layer is each hospital's own.

mpirun -np 3 python hospitals.py
"""

import h5py
import numpy as np

import fedmpi

HOSPITALS = ("Aachen", "Bonn", "Celle")


def write_silo(client, name, draw):
    """A hospital's own file: age and blood pressure, ill or not; each hospital draws the line elsewhere."""
    with h5py.File(f"hospital_{client}.h5", "w") as file:
        for split, number in (("train", 400), ("test", 200)):
            features = draw.standard_normal((number, 2)).astype("float32")
            file[f"{split}/images"] = features
            file[f"{split}/labels"] = (features[:, 0] + (client - 1) * features[:, 1] > 0).astype("int64")
        file.attrs["silo"], file.attrs["num_classes"] = name, 2


def main():
    from mpi4py import MPI  # not at the top, which worker processes import anew

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    for client in range(rank, len(HOSPITALS), size):  # every rank writes only what is its own
        write_silo(client, HOSPITALS[client], np.random.default_rng(client))
    MPI.COMM_WORLD.Barrier()

    common = {"data": "hospital_{client}.h5", "clients": 3, "rounds": 20, "algorithm": "fedavg"}
    for name, private in (("common", None), ("personal", "3")):  # the mlp's layers are called 1 and 3
        run = fedmpi.train(**common, private=private, name=name)
        if rank == 0:
            accuracies = fedmpi.load_run(run.folder).clients["accuracy"]
            print(name, dict(zip(HOSPITALS, np.round(accuracies, 3).tolist())))


if __name__ == "__main__":
    main()
