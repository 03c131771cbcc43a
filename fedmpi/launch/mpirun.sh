#!/usr/bin/env bash
# Starts MPI ranks with the options that fedmpi needs, for any MPI: finds the launcher of the MPI that mpi4py uses, sets
# threads, binding, oversubscription and malloc, takes hosts from a file or from the scheduler (SLURM, PBS, LSF), and
# restarts a killed job.
#
#   launch/mpirun.sh -np 4 python -m fedmpi.train --name mine --resume auto
#   launch/mpirun.sh --hosts launch/hosts.example --max-restarts 5 python -m fedmpi.train --name mine --resume auto
#
#   -np N             number of ranks; default: the slots of all hosts, SLURM's tasks, or the cores of this machine
#   --hosts FILE      a line per host: NAME or NAME:SLOTS or NAME slots=SLOTS; the program must be installed on each
#   --max-restarts N  start the job again, at most N times, if it was stopped (exit code 75) or if a rank, a host or
#                     mpirun itself was killed; not after an error that would occur again; default: 0
# MPIRUN=PATH names another launcher.  Exit code: that of the last attempt.
set -euo pipefail

say() { printf 'fedmpi: %s\n' "$*" >&2; }
fail() { say "error: $*"; exit 2; }
usage() { sed -n '2,/^# MPIRUN/s/^# \{0,1\}//p' "$0"; }

ranks='' hosts='' max_restarts=0
while [ $# -gt 0 ]; do
    case $1 in
    -np | -n | --hosts | --max-restarts)
        [ $# -ge 2 ] || fail "$1: expected a value after it"
        case $1 in
        --hosts) hosts=$2 ;;
        --max-restarts) max_restarts=$2 ;;
        *) ranks=$2 ;;
        esac
        shift 2
        ;;
    -h | --help) usage; exit 0 ;;
    -*) fail "$1: expected -np, --hosts or --max-restarts, then the program (see --help)" ;;
    *) break ;;
    esac
done
[ $# -gt 0 ] || fail "no program: expected one like python -m fedmpi.train (see --help)"
[[ $max_restarts =~ ^[0-9]+$ ]] || fail "--max-restarts $max_restarts: expected a whole number"
[[ $ranks =~ ^([1-9][0-9]*)?$ ]] || fail "-np $ranks: expected a whole number >= 1"

files=$(mktemp -d)
trap 'rm -rf "$files"' EXIT

# The hosts as lines "NAME SLOTS": of the user's file, or of the job that a scheduler has given us.
if [ -n "$hosts" ]; then
    [ -r "$hosts" ] || fail "--hosts $hosts: cannot be read"
    sed -e 's/#.*//' -e 's/slots=//' -e 's/:/ /' "$hosts" | awk 'NF { print $1, (NF > 1 ? $2 : 1) }' >"$files/hosts"
    ! grep -qvE '^[^ ]+ [1-9][0-9]*$' "$files/hosts" ||
        fail "--hosts $hosts: expected lines like host1:4, and not '$(grep -vE -m 1 '^[^ ]+ [1-9][0-9]*$' "$files/hosts")'"
    [ -s "$files/hosts" ] || fail "--hosts $hosts: names no host"
elif [ -n "${PBS_NODEFILE:-}${LSB_DJOB_HOSTFILE:-}" ] && [ -z "${SLURM_JOB_ID:-}" ]; then
    # One line per slot; the same host's lines follow each other.
    uniq -c "${PBS_NODEFILE:-$LSB_DJOB_HOSTFILE}" | awk '{ print $2, $1 }' >"$files/hosts"
fi
if [ -s "$files/hosts" ]; then # one line per host: Open MPI takes no host twice
    awk '!($1 in slots) { order[++n] = $1 } { slots[$1] += $2 } END { for (i = 1; i <= n; i++) print order[i], slots[order[i]] }' \
        "$files/hosts" >"$files/sums"
    mv "$files/sums" "$files/hosts"
fi
# What the control groups and the scheduler leave to this job, which nproc does not look at; and the MPI that mpi4py uses.
python=python
[[ $1 != *python* ]] || python=$1
limit_and_vendor=$("$python" -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI
from fedmpi.ground.machine.cores import cores_of_job; print(cores_of_job(), MPI.get_vendor()[0])') ||
    fail "$python cannot load fedmpi, or MPI through mpi4py; see the message above"
cores=$(nproc) limit=${limit_and_vendor%% *} vendor=${limit_and_vendor#* }
[ "$limit" -ge "$cores" ] || cores=$limit
if [ -s "$files/hosts" ]; then
    slots=$(awk '{ sum += $2 } END { print sum }' "$files/hosts")
    most=$(awk '$2 > most { most = $2 } END { print most }' "$files/hosts") # on one host
    ranks=${ranks:-$slots}
    [ "$ranks" -le "$slots" ] || most=$ranks
elif [ -n "${SLURM_JOB_ID:-}" ]; then # MPI's launcher takes the hosts from SLURM
    slots=${SLURM_NTASKS:-${SLURM_JOB_NUM_NODES:-1}} most=${SLURM_TASKS_PER_NODE:-1}
    most=${most%%[!0-9]*} # of 4(x2): 4 on each of two nodes
    ranks=${ranks:-$slots}
    [ "$ranks" -le "$slots" ] || most=$ranks
    # It starts a daemon per node by srun, whose ranks may then use all cores of the job.
    [[ $(scontrol show config 2>&1) != *task/affinity* ]] || export SLURM_CPU_BIND=none
else
    ranks=${ranks:-$cores} most=${ranks:-$cores}
fi

# The launcher must belong to the MPI that mpi4py uses: another one starts every rank as a job of its own.
belongs() {
    local version
    version=$("$1" --version 2>&1) || return 1
    case $vendor in
    "Open MPI") [[ $version == *"Open MPI"* || $version == *OpenRTE* || $version == *prte* || $version == *PRRTE* ]] ;;
    *) [[ $version == *HYDRA* || $version == *Hydra* || $version == *MPICH* || $version == *Intel* ]] ;;
    esac
}
launcher=''
beside=$(dirname "$(command -v "$python")")
for one in ${MPIRUN:+"$MPIRUN"} "$beside/mpirun" mpirun mpiexec mpirun.openmpi mpirun.mpich mpiexec.mpich mpiexec.hydra; do
    if command -v "$one" >/dev/null && belongs "$one"; then
        launcher=$(command -v "$one")
        break
    fi
done
[ -n "$launcher" ] || fail "found no mpirun of $vendor, which mpi4py uses (python -m mpi4py --mpi-library); MPIRUN names one"

# Each rank has its share of a host's cores; a program may set its threads itself.
share=$((cores / most))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((share > 0 ? share : 1))}
# Training allocates and frees the same memory at every step: let malloc keep it.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592:glibc.malloc.top_pad=67108864}
export UCX_LOG_LEVEL=${UCX_LOG_LEVEL:-error} # it warns of each message that a rank that ends needs no more
words=(-np "$ranks")
if [ "$vendor" = "Open MPI" ]; then
    [ "$EUID" -ne 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    # It binds each rank to one core, refuses more ranks than cores, and gives remote ranks no variables, unless these options say otherwise.
    words+=(--bind-to none --oversubscribe -x OMP_NUM_THREADS -x GLIBC_TUNABLES)
    [ -z "${PYTHONPATH:-}" ] || words+=(-x PYTHONPATH)
    # Without it, its mpirun ends the job when a rank dies.
    [[ " $* " != *--on[-_]loss[=\ ]continue\ * ]] || words+=(--with-ft ulfm)
    if [ -s "$files/hosts" ]; then
        sed 's/ / slots=/' "$files/hosts" >"$files/hostfile"
        words+=(--hostfile "$files/hostfile")
    fi
elif [ -s "$files/hosts" ]; then
    sed 's/ /:/' "$files/hosts" >"$files/hostfile"
    words+=(-f "$files/hostfile")
fi

# What MPICH's launcher says of itself where a host is lost: it tells a user nothing. Lines without an end, such as a
# progress bar's, pass only at their end; so only jobs on several hosts go through this.
NOISE='^\[(mpiexec|proxy:[0-9:]+)@.*(assert \(.*\) failed|error waiting for|callback returned error|launcher returned error|terminated badly)'
start() {
    if [ "$vendor" = "Open MPI" ] || [ ! -s "$files/hosts" ]; then exec "$@"; fi
    exec "$@" 2> >(trap '' INT TERM USR1; exec grep --line-buffered -vE "$NOISE" >&2)
}

# Exit codes after which another attempt may go better: a run that was stopped (75); a killed rank (MPICH: 9, Open MPI:
# 137); a killed mpirun (137); a lost host (MPICH: 255).
may_go_better() { case $1 in 75 | 9 | 137 | 255) ;; *) return 1 ;; esac; }

asked=''
forward() {
    asked=yes woken=yes
    # On the others Open MPI's mpirun kills the ranks before they can write a checkpoint. Before the first round it may.
    [ "$vendor" != "Open MPI" ] || compgen -G "$FEDMPI_UNFINISHED/prepares-*" >/dev/null || set -- USR1
    kill -s "$1" "$job" 2>/dev/null || true
}
for signal in INT TERM USR1; do trap "forward $signal" $signal; done
attempt=0
export FEDMPI_UNFINISHED=$files/unfinished # see fedmpi/comm/faults/marks.py
while :; do
    rm -rf "$FEDMPI_UNFINISHED"
    mkdir "$FEDMPI_UNFINISHED"
    start "$launcher" "${words[@]}" "$@" &
    job=$!
    while :; do
        woken='' code=0
        wait $job || code=$?
        [ -n "$woken" ] || break # a signal ends `wait` before the job has ended
    done
    if [ $code = 0 ] && compgen -G "$FEDMPI_UNFINISHED/open-*" >/dev/null; then
        say "error: $launcher returned 0, but a rank ended before it was finished"
        code=1
    fi
    if [ -n "$asked" ] || [ $attempt -ge "$max_restarts" ] || ! may_go_better $code; then exit $code; fi
    attempt=$((attempt + 1))
    say "the job ended with exit code $code; restart $attempt of $max_restarts"
    case " $* " in *" --resume"*) ;; *) say "without --resume auto and --name it starts a new run" ;; esac
    # Until what is left of the killed job has ended: ranks may outlive a killed mpirun (exit code 137) by 4 s.
    if [ $code = 137 ]; then sleep 6; else sleep 2; fi
done
