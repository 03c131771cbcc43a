"""A sweep as a SLURM job array: the template's own lines, and which run an array task is."""

import re
import shlex

from fedmpi.errors import UserError

ARGUMENTS = '"$@"'
PLACES_OF_RANKS = re.compile(r"#SBATCH\s+(--nodes|-N|--ntasks-per-node)\b")  # in the way of another number of ranks
LOCKED = 75  # exit code of flock where somebody else holds the lock; others mean that there are no locks


def job_array(template, plan, runs, ranks, at_a_time):
    """The text of a job script whose array tasks are the runs.

    Args:
        template: text of a job script that trains with its arguments, like slurm/train.sbatch.
        plan: a `Plan`. runs: list of `Planned`.
        ranks: of each run, or None for those of the template. at_a_time: most runs at once, or None.

    Raises:
        UserError: if the template is not like that.
    """
    lines = template.splitlines()
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    begin = next((number for number, line in enumerate(lines) if line.startswith("set -e")), None)
    if not directives or begin is None or ARGUMENTS not in template:
        raise UserError(f"the template: expected #SBATCH lines, a line 'set -euo pipefail', and {ARGUMENTS} behind it")
    limit = f"%{at_a_time}" if at_a_time else ""
    lines[begin + 1 : begin + 1] = _choice(plan, runs)
    lines.insert(directives[-1] + 1, f"#SBATCH --array=0-{len(runs) - 1}{limit}")
    if ranks:
        lines.insert(directives[-1] + 1, f"#SBATCH --ntasks={ranks}")
        lines = [line for line in lines if not PLACES_OF_RANKS.match(line)]
    return "\n".join(lines) + "\n"


def _choice(plan, runs):
    """Lines that make the arguments those of the array task's run, and skip it where it is complete."""
    cases = []
    for number, run in enumerate(runs):
        cases.append(f"{number})")
        cases.append(f"    folder={shlex.quote(str(plan.folder(run)))}")
        cases.append(f"    set -- {shlex.join(plan.words(run))} {ARGUMENTS}")
        cases.append("    ;;")
    return [
        "",
        "# Which run of the sweep this array task is.  What you say behind the script's name goes last and wins.",
        "case ${SLURM_ARRAY_TASK_ID:?start this script as an array} in",
        *cases,
        "*)",
        '    echo "no run number $SLURM_ARRAY_TASK_ID in this sweep" >&2',
        "    exit 2",
        "    ;;",
        "esac",
        "# The lock on the run's log, as a sweep without SLURM takes it; held until the launcher ends.",
        'exec 9>>"$folder.log"',
        f'flock -n -E {LOCKED} 9 || [ $? -ne {LOCKED} ] || {{ echo "$folder: is being made elsewhere" >&2; exit 1; }}',
        '[ ! -e "$folder/model.pt" ] || { echo "$folder is complete"; exit 0; }',
        'if [ -e "$folder/settings.yaml" ]; then rm -r -- "$folder"; fi   # a try that did not end',
    ]
