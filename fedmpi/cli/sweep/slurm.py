"""A sweep as a SLURM job array: a template of a job script, completed with the sweep's arguments."""

import re
import shlex

from fedmpi.ground.errors import UserError
from fedmpi.ground.text import format_ranges

ARGUMENTS = '"$@"'
SIGNATURE = b"# Written by fedmpi sweep --emit-slurm, which replaces this file.\n"
NODES = re.compile(r"#SBATCH\s+(--nodes|-N|--ntasks-per-node)\b")  # would contradict another number of ranks


def job_array(template, words, numbers, ranks, at_a_time):
    """The text of a job script whose array tasks are runs of a sweep.

    Args:
        template: text of a job script like slurm/sweep.sbatch.
        words: arguments of the sweep. numbers: which of its runs the array tasks are.
        ranks: of each run, or None for the template's number. at_a_time: most runs at once, or None.

    Raises:
        UserError: if the template is something else.
    """
    lines = template.splitlines()
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    begin = next((number for number, line in enumerate(lines) if line.startswith("set -e")), None)
    if not directives or begin is None or f"fedmpi_sweep {ARGUMENTS}" not in template:
        raise UserError(
            f"the template: expected #SBATCH lines, a line 'set -euo pipefail', and fedmpi_sweep {ARGUMENTS} after it"
        )
    limit = f"%{at_a_time}" if at_a_time else ""
    # Arguments after the script's name override the sweep's.
    lines.insert(begin + 1, f"set -- {shlex.join(words)} {ARGUMENTS}")
    lines.insert(directives[-1] + 1, f"#SBATCH --array={format_ranges(numbers)}{limit}")
    if ranks:
        lines.insert(directives[-1] + 1, f"#SBATCH --ntasks={ranks}")
        lines = [line for line in lines if not NODES.match(line)]
    lines.insert(int(lines[0].startswith("#!")), SIGNATURE.decode().rstrip())
    return "\n".join(lines) + "\n"
