"""Which data a run is trained on: recorded in its folder, and compared with those of the run that it repeats."""

import json
import sys

from fedmpi.comm.agreement import agree, allgather_lines
from fedmpi.runs.data_files import describe_file, difference, read_data_files, write_data_files


def account_for_data(job, recorder):
    """Write which data the run is trained on, and say so if the settings came from a run on others. Collective."""
    mine = agree(job.link, lambda: [describe_file(path) for path in job.task.data_files()])
    lines = allgather_lines(job.link, [json.dumps(one) for one in mine])
    if recorder is None:
        return
    files = [json.loads(line) for line in lines]
    for folder in filter(None, dict.fromkeys([recorder.folder, job.config.origin])):
        what = difference(read_data_files(folder), files)
        if what:
            print(f"fedmpi: the data differ from those of {folder}: {what}", file=sys.stderr, flush=True)
    recorder.write(lambda folder: write_data_files(folder, files))
