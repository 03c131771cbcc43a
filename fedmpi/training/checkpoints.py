"""When a run writes checkpoints. All functions are collective unless they say otherwise.

Each rank writes the state of its own clients, rank 0 also the state that all share. If memory allows, the state is
copied between two rounds and a thread writes the copy while training goes on. When the ranks have reported in their
round messages that all have written, rank 0 completes the checkpoint by its manifest.
"""

import time

import torch

from fedmpi.comm.agreement import agree
from fedmpi.errors import UserError
from fedmpi.membership.replicas import check_replicas
from fedmpi.own_files import write_mark
from fedmpi.run_files import SERVER_STATE, had_checkpoints
from fedmpi.runs.checkpoint import (
    checkpoint_folder,
    client_file,
    client_folder,
    describe_layout,
    make_folders,
    remove_checkpoints,
    remove_client_file,
    sync_folder,
    unique_name,
    write_manifest,
)
from fedmpi.text import Log
from fedmpi.training.checkpoint_writer import FAILED, WRITING, CheckpointWriter, available_memory, copied
from fedmpi.training.resuming import resume

log = Log(__name__)

DUE = 8  # a bit of `Federation.requests`, as those of `fedmpi.training.checkpoint_writer`
SMALL = 64 << 20  # bytes that are copied in any case
SHARE_OF_MEMORY = 0.5  # of what is available on the node, for the copies of all its ranks


class Checkpoints:
    """The checkpoints of one run.

    Args:
        job: the `Job`. folder: path of the run folder. recorder: on rank 0, None elsewhere.
        identity: of the run, see `Recorder`.

    Attributes:
        done: number of rounds after which the newest checkpoint was made; None if there is none.
        records: of the run, a `Records`, once there is one.

    Raises:
        AgreedUserError: on every rank, if the folder of the clients' state cannot be made.
    """

    def __init__(self, job, folder, recorder, identity):
        self._job, self._folder, self._first_recorder, self.records = job, folder, recorder, None
        self._identity, self._run_name = identity, unique_name(folder, identity)
        # Round after which there is a complete checkpoint -> client -> the round after which its state in it was
        # written: for a lost client an earlier one, or None.
        self._rounds = {}
        self._sizes = {}  # client -> (size, checksum) of its newest file that belongs to a checkpoint
        self._pending, self._began = None, time.monotonic()
        agree(job.link, self._check_client_folders)

    @property
    def folder(self):
        """The run folder, a `pathlib.Path`."""
        return self._folder

    @property
    def done(self):
        return max(self._rounds, default=None)

    @property
    def _recorder(self):
        """On the rank that is 0 now, None elsewhere."""
        return self.records.recorder() if self.records else self._first_recorder

    def request(self):
        """This rank's bits of `Federation.requests`; rank 0's clock decides when one is due. Not collective."""
        if self._pending is not None:
            return self._pending.bits
        minutes = self._job.config.run.checkpoint_minutes
        is_due = minutes > 0 and time.monotonic() - self._began >= 60 * minutes
        return DUE if is_due and self._job.link.rank == 0 else 0

    def after_round(self, own):
        """Complete what is written, and begin a checkpoint if one is due.

        Args:
            own: function without arguments that returns the state of the training loop itself: name -> number.
        """
        federation, every = self._job.federation, self._job.config.run.checkpoint_every
        if self._pending is not None and not federation.requests & WRITING:
            self._complete(federation.requests & FAILED)
        if federation.requests & DUE or (every and federation.round_index % every == 0):
            self.finish()
            self.begin(own)

    def begin(self, own):
        """Begin to write the current state; without memory for a copy, write all of it before returning.

        Raises:
            ReplicasDiffer: on every rank, if the user asked for checks and one fails: every checkpoint is a good one.
        """
        federation, link = self._job.federation, self._job.link
        if self._job.config.run.check_replicas:
            check_replicas(federation)
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
            self._pending = CheckpointWriter(number, copied(files), position, link.members, self._identity)
            self._pending.start()
        else:
            self._pending = CheckpointWriter(number, files, position, link.members, self._identity)
            self._pending.run()

    def write_now(self, own):
        """Write a checkpoint of the current state, unless there is one, and wait for it; whether there is one then."""
        self.finish()
        members = None
        while self.done != self._job.federation.round_index and members != self._job.link.members:
            members = self._job.link.members  # again, if a rank is lost meanwhile
            self.begin(own)
            self.finish()
        return self.done == self._job.federation.round_index

    def finish(self):
        """Wait for what is being written, and complete it."""
        if self._pending is not None:
            self._pending.wait()
            self._complete(self._job.link.allgather([self._pending.bits & FAILED]).any())

    def restore(self):
        """Go on from the newest checkpoint that is not damaged; damaged ones are named on standard error.

        Returns:
            (the state of the training loop, name -> number; the manifest).

        Raises:
            AgreedUserError: on every rank, if there is none, or its settings differ in what is learned.
        """
        loop, manifest, manifests = resume(self._job, self._folder, self._run_name)
        self._adopt(manifests)
        return loop, manifest

    def _check_client_folders(self):
        pattern = self._job.config.run.checkpoint_clients
        for client in self._job.context.clients if pattern else ():
            try:
                make_folders(self._client_folder(0, client).parent)
            except OSError as error:
                raise UserError(f"checkpoint_clients: {error.filename}: cannot be created: {error.strerror}") from None

    def _client_folder(self, round_index, client):
        pattern, rank = self._job.config.run.checkpoint_clients, self._job.link.rank
        return client_folder(pattern, self._folder, round_index, client, rank, self._run_name)

    def _complete(self, failed):
        """List the files that all ranks have written in a manifest, or remove them if one could not be written."""
        link, written, self._pending = self._job.link, self._pending, None
        if written.problem:
            kept = f"the last one is that of round {self.done}" if self._rounds else "there is no other one yet"
            log.warning(f"the checkpoint of round {written.number} could not be written: {written.problem}; {kept}")
        checksums = {} if failed else self._allgather_checksums(written)
        failed = failed or link.members != written.members  # a file of a lost rank may be missing
        problem = self._write_manifest(written, checksums) if link.rank == 0 and not failed else None
        if not failed and link.first_rank_where(problem is not None) is None and link.members == written.members:
            self._rounds[written.number] = self._rounds_written(written.number, checksums)
            self._sizes |= checksums
        else:
            self._remove_clients(written.number)
        self._prune()

    def _allgather_checksums(self, written):
        """Client -> (size, checksum) of all clients' files."""
        mine = [(client, *written.sizes[client_file(client)]) for client in self._job.context.clients]
        everyone = self._job.link.allgatherv([number for one in mine for number in one]).reshape(-1, 3)
        return {int(client): (int(nbytes), int(checksum)) for client, nbytes, checksum in everyone}

    def _write_manifest(self, written, checksums):
        """Complete the checkpoint on rank 0; returns what went wrong, or None. Not collective."""
        job, folder = self._job, checkpoint_folder(self._folder, written.number)
        rounds_written = self._rounds_written(written.number, checksums)
        files = {client_file(client): sizes for client, sizes in sorted({**self._sizes, **checksums}.items())}
        settings = {**job.config.resolved, "clients": job.context.num_clients}
        try:
            self._recorder.check_lock()
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
                "lost": {str(client): number for client, number in rounds_written.items() if number != written.number},
                "settings": settings,
                "run_name": self._run_name,
            }
            write_manifest(folder, content)
            if not had_checkpoints(self._folder):
                write_mark(self._folder, "run", self._identity, checkpoints=True)
        except OSError as error:
            problem = f"{error.filename or folder}: cannot be written: {error.strerror}"
            log.warning(f"the checkpoint of round {written.number} could not be written: {problem}")
            return problem
        return None

    def _rounds_written(self, number, present):
        """Client -> the round after which its state was written, of the checkpoint after round `number`.

        Args:
            present: the clients that are not lost.
        """
        before = self._rounds[self.done] if self._rounds else {}
        return {c: number if c in present else before.get(c) for c in range(self._job.context.num_clients)}

    def _prune(self):
        """Remove what does not belong to the newest checkpoints."""
        kept = sorted(self._rounds)[-self._job.config.run.checkpoint_keep :]
        dropped = {one for rounds in self._rounds.values() for one in rounds.items() if one[1] is not None}
        self._rounds = {number: self._rounds[number] for number in kept}
        needed = {one for rounds in self._rounds.values() for one in rounds.items()}
        for client, number in dropped - needed:
            if client in self._job.context.clients:
                remove_client_file(self._client_folder(number, client), client)
        if self._job.link.rank == 0:
            remove_checkpoints(self._folder, kept, needed)
        self._job.link.barrier()  # a rank that began the next checkpoint earlier would lose its files to rank 0

    def _adopt(self, manifests):
        """Remember the checkpoints that there are, the newest first, up to the one that the run goes on from."""
        for manifest in manifests:
            rounds = dict.fromkeys(range(manifest["clients"]), manifest["round"])
            rounds |= {int(client): number for client, number in manifest.get("lost", {}).items()}
            self._rounds[manifest["round"]] = rounds
        clients, sizes = range(manifests[0]["clients"]), manifests[0]["files"]
        self._sizes = {c: tuple(sizes[client_file(c)]) for c in clients if client_file(c) in sizes}

    def _remove_clients(self, number):
        """Remove this rank's files of a checkpoint. Not collective."""
        for client in self._job.context.clients:
            remove_client_file(self._client_folder(number, client), client)
