"""Which data a run is trained on: recorded in its folder, and compared with those of the run that it repeats."""

import json

from fedmpi.comm.agreement import agree, allgather_lines, share
from fedmpi.ground.files.checksum import file_digest, salted
from fedmpi.ground.text import Log
from fedmpi.runs.data_files import difference, read_data_files, write_data_files

log = Log(__name__)


def account_for_data(job, recorder):
    """Write which data the run is trained on, and say so if the settings came from a run on others. Collective."""
    folders = () if recorder is None else filter(None, dict.fromkeys([recorder.folder, job.config.origin]))
    earlier = {folder: read_data_files(folder) for folder in folders}
    salts = share(job.link, lambda: [salt for salt, _ in earlier.values()])
    own_digests = agree(job.link, lambda: [file_digest(path) for path in job.task.data_files()])
    lines = allgather_lines(
        job.link, [json.dumps({salt: salted(digest, salt) for salt in salts}) for digest in own_digests], "file digests"
    )
    files = list(map(json.loads, lines))
    for folder, (salt, before) in earlier.items():
        digests = [of_file[salt] for of_file in files]
        if changes := difference(before, digests):
            log.warning(f"the data differ from those of {folder}: {changes}")
        if folder == recorder.folder:
            recorder.write(lambda folder, salt=salt, digests=digests: write_data_files(folder, salt, digests))
