#!/usr/bin/env bash
# Install fedmpi and train FAFED with 4 clients on the built-in data set (training takes seconds).
# Arguments are passed to fedmpi.train:  ./launch/quickstart.sh --algorithm fedavg --rounds 50
# RANKS=2 starts 2 ranks instead of 4.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
set_up plot,pandas # for the reports, and the tables of docs/python.md
# Every training step allocates and frees the same memory: let malloc keep it.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592:glibc.malloc.top_pad=67108864}
say "training: mpirun -np ${RANKS:-4} python -m fedmpi.train $*"
exec mpirun -np "${RANKS:-4}" python -m fedmpi.train "$@"
