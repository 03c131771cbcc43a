#!/usr/bin/env bash
# Run a program as one rank and also write what it prints to a file of its own; see FEDMPI_RANK_LOGS in job.sh.
rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-$SLURM_PROCID}}}
mkdir -p "$FEDMPI_RANK_LOGS" # on each node: it may not be shared
exec "$@" > >(exec tee -a "$FEDMPI_RANK_LOGS/$SLURM_JOB_ID-rank-$rank.log") 2>&1
