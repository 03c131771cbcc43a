#!/usr/bin/env bash
# Run a program as one rank and also write what it prints to a file of its own; see FEDMPI_RANK_LOGS in job.sh.
rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-$SLURM_PROCID}}}
exec "$@" > >(exec tee -a "$FEDMPI_RANK_LOGS/$SLURM_JOB_ID-rank-$rank.log") 2>&1
