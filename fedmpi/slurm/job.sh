# Sourced by the job scripts beside it, which need bash and a Python with fedmpi.  Variables that change what it does:
#   FEDMPI_LAUNCH="srun --mpi=pmix"  command that starts the ranks; default: several are tried, see choose_launch below
#   FEDMPI_RANK_LOGS=FOLDER          also write what rank N prints to FOLDER/JOBID-rank-N.log
#   FEDMPI_DOCTOR=0                  start without the checks (python -m fedmpi doctor)
#   FEDMPI_MAX_REQUEUES=100          how often a job requeues itself if its run ended with exit code 75
#   FEDMPI_RESTARTS=3                how often a job requeues itself after a rank was killed or a node was lost

here=$(dirname "${BASH_SOURCE[0]}")
python=$(command -v python) # Open MPI's mpirun finds another one beside itself
ranks=${SLURM_NTASKS:-$SLURM_JOB_NUM_NODES}
# Training allocates and frees the same memory at every step: let malloc keep it.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592:glibc.malloc.top_pad=67108864}
export UCX_LOG_LEVEL=${UCX_LOG_LEVEL:-error} # it warns of each message that a rank that ends needs no more
# What MPICH's launcher says of itself where a rank or a node is lost.
NOISE='^\[(mpiexec|proxy:[0-9:]+)@.*(assert \(.*\) failed|error waiting for|callback returned error|launcher returned error|terminated badly)'
NOT_FINISHED=75 # exit code of a run that wrote a checkpoint and can continue from it
PROBE_SECONDS=60

say() { printf 'fedmpi: %s\n' "$*" >&2; }

# From the start, SLURM may warn this script of the time limit (USR1) or end it (TERM): `wait_for` passes both on.
warned='' stopped='' signal='' pid='' began='' folder=''
trap 'warned=yes; pass_on "$signal"' USR1
trap 'stopped=yes; pass_on TERM' TERM
pass_on() {
    woken=yes
    [ -z "$pid" ] || kill -"$1" "$pid" 2>/dev/null || true
}

# fedmpi_train ARGUMENTS: train; requeue this job if it is not finished.
fedmpi_train() {
    local code=0
    folder=$(run_folder "$@")
    check_place "$@"
    run_ranks USR1 fedmpi.train --ranks "$ranks" --resume auto "$@" || code=$?
    finish $code
}

# run_folder SETTINGS: the folder that --out and --name give.
run_folder() {
    local out=runs name='' word before=''
    for word in "$@"; do
        case $before in
        --out) out=$word ;;
        --name) name=$word ;;
        esac
        case $word in
        --out=*) out=${word#*=} ;;
        --name=*) name=${word#*=} ;;
        esac
        before=$word
    done
    echo "$out/$name"
}

# fedmpi_program FILE ARGUMENTS: start a program of the user's own; requeue this job if it is not finished.
fedmpi_program() {
    local code=0
    check_place
    wait_for USR1 $FEDMPI_LAUNCH "$python" -m mpi4py "$@" || code=$?
    finish $code
}

# fedmpi_sweep ARGUMENTS: make the sweep's run of this array task, or without an array all that are not complete.
fedmpi_sweep() {
    local ranges range number numbers=() worst=0 code
    ranges=${SLURM_ARRAY_TASK_ID:-$(python -m fedmpi sweep --todo "$@")} || exit 2
    for range in ${ranges//,/ }; do # like 0-2,4
        mapfile -t -O ${#numbers[@]} numbers < <(seq "${range%-*}" "${range#*-}")
    done
    for number in "${numbers[@]}"; do
        code=0
        sweep_run "$number" "$@" || code=$?
        case $code in
        0) ;;
        2 | "$NOT_FINISHED") finish $code ;; # wrong settings; or the time is over
        *) worst=$code ;;
        esac
        [ -z "$stopped" ] || break
    done
    finish $worst
}

# sweep_run NUMBER ARGUMENTS: make one run of a sweep, unless it is complete.
sweep_run() {
    local text words word out name code=0
    text=$(python -m fedmpi sweep --words "$@") || return 2
    [ -n "$text" ] || { say "run $1 is complete"; return 0; }
    mapfile -t words <<<"$text"
    for word in "${words[@]}"; do
        case $word in
        --out=*) out=${word#*=} ;;
        --name=*) name=${word#*=} ;;
        esac
    done
    # The lock that a sweep without SLURM takes, too; kept until the launcher ends.  Some file systems have none.
    exec 9>>"$out/$name.log"
    flock -n -E $NOT_FINISHED 9 || [ $? -ne $NOT_FINISHED ] || { say "$out/$name: is being made elsewhere"; return 1; }
    folder=$out/$name
    check_place "${words[@]}"
    run_ranks USR1 fedmpi.train --ranks "$ranks" --resume auto "${words[@]}" || code=$?
    exec 9>&-
    return $code
}

# fedmpi_bench FILE PARTS ARGUMENTS: measure each of the PARTS (one word) into FILE-PART.json, unless that is there.
fedmpi_bench() {
    local file=$1 parts=$2 part code=0
    shift 2
    check_place
    for part in $parts; do
        [ ! -s "$file-$part.json" ] || continue
        code=0
        run_ranks TERM fedmpi.cli.bench "$part" --json "$file-$part.json" "$@" || code=$?
        [ $code -eq 0 ] || break
    done
    finish $code
}

# check_place SETTINGS: find a way to start ranks, and check the place for a run with these settings; once in a job.
check_place() {
    [ -z "${checked:-}" ] || return 0
    checked=yes
    choose_launch
    say "$ranks ranks on $SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST), started by: $FEDMPI_LAUNCH"
    [ "${FEDMPI_DOCTOR:-1}" = 0 ] || check_ranks "$@"
    [ -z "${FEDMPI_RANK_LOGS:-}" ] || FEDMPI_LAUNCH+=" bash $here/rank_log.sh"
}

# check_ranks SETTINGS: run the doctor; end the job if a check fails.
check_ranks() {
    $FEDMPI_LAUNCH "$python" -m mpi4py -m fedmpi doctor --ranks "$ranks" "$@" || {
        [ -z "$stopped" ] || finish 143
        say "the checks failed: nothing was started (FEDMPI_DOCTOR=0 starts without checks)"
        exit 2
    }
}

# choose_launch: set FEDMPI_LAUNCH to the first way of starting ranks in which they find each other.
choose_launch() {
    local vendor beside kind words tried=()
    [ "$EUID" -ne 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    [ -z "${FEDMPI_LAUNCH:-}" ] || { launch_environment; return 0; }
    vendor=$(python -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])')
    beside=$(dirname "$python")
    case $vendor in
    "Open MPI") kind=pmix words="--bind-to none" ;;
    *) kind=pmi2 words= ;;
    esac
    # A wheel's MPI has its launcher beside python.  Elsewhere srun comes first, then the loaded module's mpirun.
    [ ! -x "$beside/mpirun" ] || tried+=("$beside/mpirun -np $ranks $words")
    [[ $(srun --mpi=list 2>&1) != *$kind* ]] || tried+=("srun --kill-on-bad-exit=1 --mpi=$kind")
    ! command -v mpirun >/dev/null || tried+=("mpirun -np $ranks $words")
    for FEDMPI_LAUNCH in "${tried[@]}"; do
        launch_environment
        ! ranks_find_each_other || return 0
        [ -z "$stopped" ] || finish 143
    done
    say "no way to start $ranks ranks that find each other through $vendor; tried:"
    printf 'fedmpi:   %s\n' "${tried[@]}" >&2
    say "load the MPI module that mpi4py uses (python -m mpi4py --mpi-library), or set FEDMPI_LAUNCH"
    exit 2
}

ranks_find_each_other() {
    timeout $PROBE_SECONDS $FEDMPI_LAUNCH "$python" -m mpi4py -c \
        "from mpi4py import MPI; import sys; sys.exit(MPI.COMM_WORLD.size != $ranks)" >/dev/null 2>&1
}

# launch_environment: what srun reads, for ranks that it starts itself and for the daemons of an mpirun.
launch_environment() {
    case $FEDMPI_LAUNCH in
    *srun*) export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} ;;
    *) # mpirun starts one daemon per node by srun, whose ranks may then use all cores of the job
        [[ $(scontrol show config 2>&1) != *task/affinity* ]] || export SLURM_CPU_BIND=none
        ;;
    esac
}

# run_ranks SIGNAL MODULE ARGUMENTS: start the ranks and return their exit code, see `wait_for`.
run_ranks() {
    local signal=$1
    shift
    # `python -m mpi4py` ends the job if a rank dies of an error before fedmpi itself watches.
    wait_for "$signal" $FEDMPI_LAUNCH "$python" -m mpi4py -m "$@"
}

# wait_for SIGNAL COMMAND: run a command and return its exit code, or 75 if it did not end well after a warning of the
# time limit. The warning is passed on to it as SIGNAL.
wait_for() {
    local signal=$1 code filter
    shift
    [ -z "$stopped" ] || return 143
    [ -z "$warned" ] || [ -z "$began" ] || return $NOT_FINISHED # warned between two commands
    exec 3> >(trap '' INT TERM USR1; exec grep --line-buffered -vE "$NOISE" >&2)
    filter=${!:-}
    FEDMPI_UNFINISHED=$(mktemp -d) # see fedmpi/comm/faults/marks.py
    export FEDMPI_UNFINISHED
    "$@" 2>&3 3>&- &
    pid=$! began=yes
    # Warned during the checks: the time limit is short, and half of what is left of it is for the command.
    [ -z "$warned" ] || { sleep $(($(seconds_left) / 2)); pass_on "$signal"; } 3>&- &
    while :; do
        woken='' code=0
        wait $pid || code=$?
        [ -n "$woken" ] || break # a signal ends `wait` before the ranks have ended
    done
    pid=''
    exec 3>&- # the filter ends with the last process that writes to it; these lines come before ours
    for _ in {1..20}; do kill -0 "$filter" 2>/dev/null && sleep 0.1 || break; done
    if [ $code -eq 0 ] && compgen -G "$FEDMPI_UNFINISHED/open-*" >/dev/null; then
        say "error: $1 returned 0, but a rank ended before it was finished"
        code=1
    fi
    rm -rf "$FEDMPI_UNFINISHED"
    # Ranks that were warned before they could hear it were ended by the signal; wrong settings stay wrong.
    if [ -n "$warned" ] && [ $code -ne 0 ] && [ $code -ne 2 ]; then code=$NOT_FINISHED; fi
    return $code
}

# seconds_left: until the job's time limit; 0 after it.
seconds_left() {
    local left=$(($(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s) - $(date +%s)))
    echo $((left > 0 ? left : 0))
}

# finish CODE: end this job; if it is not finished, requeue it.
finish() {
    local most count=${SLURM_RESTART_COUNT:-0} code=$1
    if [ -n "$stopped" ]; then
        # Of these, SLURM requeues preempted jobs and those of lost nodes itself.
        if [[ $(scontrol -o show job "$SLURM_JOB_ID") != *Reason=TimeLimit* || $code -eq 0 ]]; then
            say "job $SLURM_JOB_ID was ended by SLURM: cancelled, preempted, or a node was lost"
            exit 143
        fi
        code=$NOT_FINISHED # the ranks may not have had the time to say so
    fi
    trap - TERM
    case $code in
    "$NOT_FINISHED") most=${FEDMPI_MAX_REQUEUES:-100} ;;
    9 | 14 | 137 | 143 | 255) # what launchers say of a killed rank or a lost node; the job's comment counts these
        count=$(scontrol -o show job "$SLURM_JOB_ID" | sed -n 's/.* Comment=fedmpi-losses-\([0-9]*\).*/\1/p')
        count=${count:-0} most=${FEDMPI_RESTARTS:-3}
        [ "$count" -ge "$most" ] || scontrol update "JobId=$SLURM_JOB_ID" "Comment=fedmpi-losses-$((count + 1))" || true
        ;;
    *) exit "$code" ;;
    esac
    if [ "$count" -ge "$most" ]; then
        say "job $SLURM_JOB_ID ended with exit code $code after $count of at most $most requeues"
    else
        say "job $SLURM_JOB_ID is not finished (exit code $code): it is requeued, and continues later${folder:+ in $folder}"
        ! scontrol requeue "$SLURM_JOB_ID" || sleep 120 # until SLURM ends this script
        say "job $SLURM_JOB_ID cannot be requeued"
    fi
    say "to continue, submit it again${folder:+ with the same --name}"
    exit "$code"
}
