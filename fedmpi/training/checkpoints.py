"""When a run writes checkpoints. All of it is collective unless it says otherwise.

Each rank writes the state of its own clients, rank 0 also the state that all share. Where memory allows, the state is
copied between two rounds and a thread writes the copy while training goes on; in a later message the ranks tell
each other that they have written, and rank 0 completes the checkpoint by its manifest.
"""

import sys
import time

import torch

from fedmpi.comm.agreement import agree
from fedmpi.errors import UserError
from fedmpi.run_files import SERVER_STATE
from fedmpi.runs.checkpoint import (
    checkpoint_folder,
    client_file,
    client_folder,
    describe_layout,
    make_folders,
    remove_checkpoints,
    remove_client_file,
    sync_folder,
    write_manifest,
)
from fedmpi.training.resuming import resume
from fedmpi.training.writing import FAILED, WRITING, Writing, available_memory, copied

DUE = 8  # a bit of `Federation.requests`, as those of `fedmpi.training.writing`
SMALL = 64 << 20  # bytes that are copied in any case
SHARE_OF_MEMORY = 0.5  # of what is available on the node, for the copies of all its ranks


class Checkpoints:
    """The checkpoints of one run.

    Args:
        job: the `Job`. folder: path of the run folder. recorder: on rank 0, None elsewhere.

    Attributes:
        done: number of rounds after which the newest checkpoint was made; None if there is none.

    Raises:
        AgreedUserError: on every rank, if the folder of the clients' state cannot be made.
    """

    def __init__(self, job, folder, recorder):
        self._job, self._folder, self._recorder = job, folder, recorder
        self._rounds = []  # after which there are complete checkpoints, the newest last
        self._pending, self._began = None, time.monotonic()
        agree(job.link, self._check_client_folders)

    @property
    def folder(self):
        """The run folder, a `pathlib.Path`."""
        return self._folder

    @property
    def done(self):
        return self._rounds[-1] if self._rounds else None

    def request(self):
        """The bits that this rank tells the others: rank 0's clock decides when one is due. Not collective."""
        if self._pending is not None:
            return self._pending.bits
        minutes = self._job.config.run.checkpoint_minutes
        is_due = minutes > 0 and time.monotonic() - self._began >= 60 * minutes
        return DUE if is_due and self._job.link.rank == 0 else 0

    def after_round(self, own):
        """Complete what is written, and begin a checkpoint if one is due.

        Args:
            own: function without arguments -> name -> number, what the training loop itself goes on with.
        """
        federation, every = self._job.federation, self._job.config.run.checkpoint_every
        if self._job.link.lost:  # the state of their clients is missing: the last checkpoint stays
            self._pending = None
            return
        if self._pending is not None and not federation.requests & WRITING:
            self._complete(federation.requests & FAILED)
        if federation.requests & DUE or (every and federation.round_index % every == 0):
            self.finish()
            self.begin(own)

    def begin(self, own):
        """Begin to write the state of this moment; ends at once where memory for a copy is missing."""
        federation, link = self._job.federation, self._job.link
        self._began, number = time.monotonic(), federation.round_index
        state, files = federation.state(), []
        for client in self._job.context.clients:
            part = {name: value for name, value in state.items() if name.startswith(f"clients/{client}/")}
            files.append((self._client_folder(number, client) / client_file(client), part))
        if link.rank == 0:
            part = {name: value for name, value in state.items() if not name.startswith("clients/")}
            part |= {f"loop/{name}": value for name, value in own().items()}
            files.append((checkpoint_folder(self._folder, number) / SERVER_STATE, part))
        position = self._recorder.position() if self._recorder else None
        nbytes = sum(value.nbytes for _, part in files for value in part.values() if isinstance(value, torch.Tensor))
        if nbytes <= max(SMALL, SHARE_OF_MEMORY * available_memory() / link.local_size):
            self._pending = Writing(number, copied(files), position)
            self._pending.start()
        else:
            self._pending = Writing(number, files, position)
            self._pending.run()

    def write_now(self, own):
        """Write a checkpoint of this moment, unless there is one, and wait for it; whether there is one then."""
        if self._job.link.lost:
            return False
        self.finish()
        if self.done != self._job.federation.round_index:
            self.begin(own)
            self.finish()
        return self.done == self._job.federation.round_index

    def finish(self):
        """Wait for what is being written, and complete it."""
        if self._pending is not None and not self._job.link.lost:
            self._pending.wait()
            self._complete(self._job.link.allgather([self._pending.bits & FAILED]).any())

    def restore(self):
        """Go on from the newest checkpoint that is as it was written; damaged ones are named on standard error.

        Returns:
            (the state of the training loop, name -> number; the manifest).

        Raises:
            AgreedUserError: on every rank, if there is none, or its settings differ in what is learned.
        """
        loop, manifest, self._rounds = resume(self._job, self._folder, self._recorder)
        return loop, manifest

    def _check_client_folders(self):
        pattern = self._job.config.run.checkpoint_clients
        for client in self._job.context.clients if pattern else ():
            folder = client_folder(pattern, self._folder, 0, client, self._job.link.rank).parent
            try:
                make_folders(folder)
            except OSError as error:
                raise UserError(f"checkpoint_clients: {error.filename}: cannot be made: {error.strerror}") from None

    def _client_folder(self, round_index, client):
        run = self._job.config.run
        return client_folder(run.checkpoint_clients, self._folder, round_index, client, self._job.link.rank)

    def _complete(self, failed):
        """Name the files that all ranks have written in a manifest, or remove them if one could not be written."""
        link, written, self._pending = self._job.link, self._pending, None
        if written.problem:
            kept = f"the last one is of round {self.done}" if self._rounds else "there is none yet"
            print(
                f"fedmpi: checkpoint of round {written.number} is not written: {written.problem}; {kept}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        checksums = {} if failed else self._gather_checksums(written)
        failed = failed or bool(link.lost)
        problem = self._write_manifest(written, checksums) if link.rank == 0 and not failed else None
        if not failed and link.first_failing(problem is not None) is None:
            self._rounds.append(written.number)
        else:
            self._remove_clients(written.number)
        self._prune()

    def _gather_checksums(self, written):
        """Client -> (size, checksum) of all clients' files."""
        mine = [(client, *written.sizes[client_file(client)]) for client in self._job.context.clients]
        everyone = self._job.link.allgatherv([number for one in mine for number in one]).reshape(-1, 3)
        return {int(client): (int(nbytes), int(checksum)) for client, nbytes, checksum in everyone}

    def _write_manifest(self, written, checksums):
        """Complete the checkpoint on rank 0; returns what went wrong, or None. Not collective."""
        job, folder = self._job, checkpoint_folder(self._folder, written.number)
        files = {client_file(client): sizes for client, sizes in sorted(checksums.items())}
        settings = {**job.config.resolved, "clients": job.context.num_clients}
        try:
            self._recorder.sync()
            sync_folder(self._folder.absolute().parent)
            content = {
                "round": written.number,
                "rounds": job.num_rounds,
                "ranks": job.link.size,
                "clients": job.context.num_clients,
                "layout": describe_layout(job.flat),
                "records": written.position,
                "files": {SERVER_STATE: written.sizes[SERVER_STATE], **files},
                "settings": settings,
            }
            write_manifest(folder, content)
        except OSError as error:
            problem = f"{error.filename or folder}: cannot be written: {error.strerror}"
            print(
                f"fedmpi: checkpoint of round {written.number} is not written: {problem}", file=sys.stderr, flush=True
            )
            return problem
        return None

    def _prune(self):
        """Remove what is not among the newest checkpoints."""
        run = self._job.config.run
        dropped, self._rounds = self._rounds[: -run.checkpoint_keep], self._rounds[-run.checkpoint_keep :]
        for number in dropped:
            self._remove_clients(number)
        if self._job.link.rank == 0:
            remove_checkpoints(self._folder, self._rounds)

    def _remove_clients(self, number):
        """Remove this rank's files of a checkpoint. Not collective."""
        for client in self._job.context.clients:
            remove_client_file(self._client_folder(number, client), client)
