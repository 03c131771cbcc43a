"""A sweep as a SLURM job array: the template's own lines, and which run an array task is."""

import re
import shlex

from fedmpi.errors import UserError
from fedmpi.run_files import MODEL, SETTINGS

ARGUMENTS = '"$@"'
NODES = re.compile(r"#SBATCH\s+(--nodes|-N|--ntasks-per-node)\b")  # would contradict another number of ranks
LOCKED = 75  # exit code of flock if another process has the lock; other codes mean that there are no locks


def job_array(template, plan, runs, ranks, at_a_time):
    """The text of a job script that makes one run in each array task.

    Args:
        template: text of a job script that trains with its arguments, like slurm/train.sbatch.
        plan: a `Plan`. runs: list of `Planned`.
        ranks: of each run, or None for the template's number. at_a_time: most runs at once, or None.

    Raises:
        UserError: if the template is something else.
    """
    lines = template.splitlines()
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    begin = next((number for number, line in enumerate(lines) if line.startswith("set -e")), None)
    if not directives or begin is None or ARGUMENTS not in template:
        raise UserError(f"the template: expected #SBATCH lines, a line 'set -euo pipefail', and {ARGUMENTS} after it")
    limit = f"%{at_a_time}" if at_a_time else ""
    lines[begin + 1 : begin + 1] = _choice(plan, runs)
    lines.insert(directives[-1] + 1, f"#SBATCH --array=0-{len(runs) - 1}{limit}")
    if ranks:
        lines.insert(directives[-1] + 1, f"#SBATCH --ntasks={ranks}")
        lines = [line for line in lines if not NODES.match(line)]
    return "\n".join(lines) + "\n"


def _choice(plan, runs):
    """Lines that set the arguments to those of the array task's run, and skip a run that is complete."""
    cases = []
    for number, run in enumerate(runs):
        cases.append(f"{number})")
        cases.append(f"    folder={shlex.quote(str(plan.folder(run)))}")
        cases.append(f"    set -- {shlex.join(plan.arguments(run))} {ARGUMENTS}")
        cases.append("    ;;")
    return [
        "",
        "# Which run of the sweep this array task is.  Arguments after the script's name override its settings.",
        "case ${SLURM_ARRAY_TASK_ID:?start this script as an array} in",
        *cases,
        "*)",
        '    echo "no run number $SLURM_ARRAY_TASK_ID in this sweep" >&2',
        "    exit 2",
        "    ;;",
        "esac",
        "# The lock on the run's log that a sweep without SLURM takes, too; kept until the launcher ends.",
        'exec 9>>"$folder.log"',
        f'flock -n -E {LOCKED} 9 || [ $? -ne {LOCKED} ] || {{ echo "$folder: is being made elsewhere" >&2; exit 1; }}',
        f'[ ! -e "$folder/{MODEL}" ] || {{ echo "$folder is complete"; exit 0; }}',
        f'if [ -e "$folder/{SETTINGS}" ]; then rm -r -- "$folder"; fi   # an attempt that did not end',
    ]
