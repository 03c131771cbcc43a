#!/usr/bin/env bash
# Install fedmpi and train FAFED with 4 clients on the embedded data set (seconds of training).
# Arguments go to fedmpi.train:  ./launch/quickstart.sh --algorithm fedavg --rounds 50
# RANKS=2 starts 2 ranks instead of 4.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
set_up ""
say "training: mpirun -np ${RANKS:-4} python -m fedmpi.train $*"
exec mpirun -np "${RANKS:-4}" python -m fedmpi.train "$@"
