"""Measure what sums between two nodes cost when their network is limited: python tests/slurm/between_nodes.py 1gbit

As root, with Debian's SLURM (see cluster.py): two nodes on this machine, two ranks on each. It runs slurm/bench.sbatch
there and shows its log, after what --project predicts for this network from measurements inside one node.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

from cluster import Cluster

ROOT = pathlib.Path(__file__).resolve().parents[2]
HARDWARE = "N=4,per_node=2,bw={bandwidth},lat=50us,parameters=1000120"


def main(rate="1gbit", *words):
    words = words or ("--quick", "--seconds", "5")
    project = HARDWARE.format(bandwidth=rate.replace("gbit", "Gb/s"))
    command = ["mpirun", "-np", "2", sys.executable, "-m", "fedmpi", "bench", "scaling", *words, "--project", project]
    print(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    with tempfile.TemporaryDirectory(prefix="fedmpi-slurm-") as folder:
        cluster = Cluster(pathlib.Path(folder))
        cluster.environment["PATH"] = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{cluster.environment['PATH']}"
        cluster.environment |= {"PYTHONPATH": str(ROOT), "FEDMPI_VENV": sys.prefix}
        try:
            cluster.throttle(rate)
            options = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"]
            script = ROOT / "slurm" / "bench.sbatch"
            number = cluster.submit(folder, script, *words, options=options, FEDMPI_PARTS="link scaling")
            print(cluster.wait(number, seconds=600).log)
        finally:
            cluster.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
