"""Every task under --aggregation masked and reproducible: the same bits. Under mpirun, with the tasks' names or none.

The tasks are those of `final_rows`, and some with personal layers. Rows, parameters, losses of rounds, and each
client's own model are compared. Rank 0 prints how many runs were the same.
"""

import contextlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import traceback

import final_rows
import h5py
from mpi4py import MPI

import fedmpi.train

USUAL = "--clients 4 --local-steps 2 --rounds 2 --eval-every 2 --evaluate-samples 200 --threads 1 --device cpu"
PIXELS = "--task segmentation --data FOLDER/masks.h5 --model torch.nn.Conv2d --model.in_channels 1 "
PIXELS += "--model.out_channels 10 --model.kernel_size 1 --algorithm fednova"
TASKS = final_rows.TASKS | {
    "segmentation": PIXELS,
    "classification, personal": f"{final_rows.TASKS['classification-images']} --private *bias --algorithm fedexp",
    "classification, batch norm personal": "--model batchnorm.Net --private bn --algorithm scaffold",
}


def make_files(folder):
    final_rows.make_files(folder)
    shutil.copy(folder / "images.h5", folder / "masks.h5")
    with h5py.File(folder / "masks.h5", "a") as file:
        for split in ("train", "test"):
            file[f"{split}/masks"] = file[f"{split}/images"][:] // 30


def run(words, folder, name):
    """Name -> bytes of a run's rows and parameters, losses of rounds, and clients' own models."""
    fedmpi.train.main(f"{words} --out {folder}/runs --name {name}".split())
    MPI.COMM_WORLD.Barrier()
    out, found = folder / "runs" / name, {}
    with h5py.File(out / "model.h5") as file:
        file.visititems(
            lambda key, item: found.update({key: item[()].tobytes()} if isinstance(item, h5py.Dataset) else {})
        )
    found["loss"] = [json.loads(line).get("loss") for line in (out / "metrics.jsonl").read_text().splitlines()]
    return found | {f"models/{file.name}": file.read_bytes() for file in out.glob("models/*")}


def main(names):
    world, number = MPI.COMM_WORLD, 0
    folder = pathlib.Path(world.bcast(tempfile.mkdtemp(prefix="fedmpi-masked-") if world.rank == 0 else None))
    if world.rank == 0:
        make_files(folder)
    world.Barrier()
    usual = f"{USUAL} --ranks {world.size}"
    if "attack" in names:
        run(f"{usual} --algorithm fedavg --data {folder}/images.h5 --model mlp", folder, "classifier")
    for name in names:
        words = TASKS[name].replace("FOLDER", str(folder))
        words = f"{usual.replace('--clients 4', '') if '--clients 3' in words else usual} {words}"
        found = []
        for place, aggregation in enumerate(("reproducible", "masked --aggregation.least-ranks 1")):
            found.append(run(f"{words} --aggregation {aggregation}", folder, f"{names.index(name)}-{place}"))
            models = [key for key in found[-1] if key.startswith("models/")]
            assert len(models) == 4 * ("--private" in words), models
        assert found[0] == found[1], name
        number += 1
    if world.rank == 0:
        shutil.rmtree(folder)
    return number


if __name__ == "__main__":
    try:
        with contextlib.redirect_stdout(open(os.devnull, "w", encoding="utf-8")):  # noqa: SIM115
            same = main(sys.argv[1:] or list(TASKS))
        if MPI.COMM_WORLD.rank == 0:
            print("same bits in", same, "runs", flush=True)
    except BaseException:
        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
