"""When a run writes checkpoints, and how it goes on from one. All of it is collective unless it says otherwise.

Each rank writes the state of its own clients, rank 0 also the state that all share. Where memory allows, the state is
copied between two rounds and a thread writes the copy while training goes on; in a later message the ranks tell
each other that they have written, and rank 0 completes the checkpoint by its manifest.
"""

import mmap
import sys
import threading
import time

import torch

from fedmpi.comm.agreement import agree, share
from fedmpi.config.grammar import flatten
from fedmpi.config.run import role
from fedmpi.errors import UserError
from fedmpi.run_files import SERVER_STATE
from fedmpi.runs.checkpoint import (
    checkpoint_folder,
    client_file,
    client_folder,
    describe_layout,
    find_checkpoints,
    make_folders,
    read_manifest,
    remove_checkpoints,
    remove_client_file,
    sync_folder,
    versions,
    write_manifest,
)
from fedmpi.runs.state_file import Damaged, read_state, write_state

DUE, WRITING, FAILED = 8, 16, 32  # bits of `Federation.requests`, above those of `fedmpi.training.stopping`
SMALL = 64 << 20  # bytes that are copied in any case
SHARE_OF_MEMORY = 0.5  # of what is available on the node, for the copies of all its ranks
LARGE_TENSOR = 1 << 20  # bytes; copies go into memory of their own, which returns to the system
MAY_DIFFER = ("rounds", "epochs", "resume", "clients")  # settings of a resumed run, beside those of speed and place


class Checkpoints:
    """The checkpoints of one run.

    Args:
        job: the `Job`. folder: path of the run folder. recorder: on rank 0, None elsewhere.

    Attributes:
        done: number of rounds after which the newest checkpoint was made; None if there is none.
        records: of the run, a `Records`, once there is one.

    Raises:
        AgreedUserError: on every rank, if the folder of the clients' state cannot be made.
    """

    def __init__(self, job, folder, recorder):
        self._job, self._folder, self._first_recorder, self.records = job, folder, recorder, None
        # Rounds after which there are complete checkpoints, the newest last -> client -> the round after which its
        # state was written: of lost clients an earlier one, or none.
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
        if nbytes <= max(SMALL, SHARE_OF_MEMORY * _available_memory() / link.local_size):
            self._pending = _Writing(number, _copied(files), position, link.members)
            self._pending.start()
        else:
            self._pending = _Writing(number, files, position, link.members)
            self._pending.run()

    def write_now(self, own):
        """Write a checkpoint of this moment, unless there is one, and wait for it; whether there is one then."""
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
        """Go on from the newest checkpoint that is as it was written; damaged ones are named on standard error.

        Returns:
            (the state of the training loop, name -> number; the manifest).

        Raises:
            AgreedUserError: on every rank, if there is none, or its settings differ in what is learned.
        """
        link, job = self._job.link, self._job
        manifests = share(link, self._read_manifests)
        if manifests:
            agree(link, lambda: self._check_settings(manifests[0]))
        for manifest in manifests:
            state, problem = {}, None
            try:
                state = self._read_files(manifest)
            except Damaged as damage:
                problem = str(damage)
            failing = link.first_failing(problem is not None)
            if failing is None:
                break
            if failing == link.rank:
                print(
                    f"fedmpi: checkpoint of round {manifest['round']} is damaged: {problem}",
                    file=sys.stderr,
                    flush=True,
                )
        else:
            agree(link, self._refuse)
        shared = self._share_state(state)
        job.federation.restore({**shared, **state})
        self._adopt(manifests, manifest)
        for client, home in manifest.get("lost", {}).items() if link.rank == 0 else ():
            since = "without a state" if home is None else f"with its state after round {home}"
            print(f"fedmpi: client {client} was lost and takes part again, {since}", file=sys.stderr, flush=True)
        return {name[len("loop/") :]: value for name, value in shared.items() if name.startswith("loop/")}, manifest

    def _check_client_folders(self):
        pattern = self._job.config.run.checkpoint_clients
        for client in self._job.context.clients if pattern else ():
            folder = client_folder(pattern, self._folder, 0, client, self._job.link.rank).parent
            try:
                make_folders(folder)
            except OSError as error:
                raise UserError(f"checkpoint_clients: {error.filename}: cannot be created: {error.strerror}") from None

    def _client_folder(self, round_index, client):
        run = self._job.config.run
        return client_folder(run.checkpoint_clients, self._folder, round_index, client, self._job.link.rank)

    def _complete(self, failed):
        """Name the files that all ranks have written in a manifest, or remove them if one could not be written."""
        link, written, self._pending = self._job.link, self._pending, None
        if written.problem:
            kept = f"the last one is that of round {self.done}" if self._rounds else "there is no other one yet"
            print(
                f"fedmpi: the checkpoint of round {written.number} could not be written: {written.problem}; {kept}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        checksums = {} if failed else self._gather_checksums(written)
        failed = failed or link.members != written.members  # a file of a lost rank may be missing
        problem = self._write_manifest(written, checksums) if link.rank == 0 and not failed else None
        if not failed and link.first_failing(problem is not None) is None and link.members == written.members:
            self._rounds[written.number] = self._homes(written.number, checksums)
            self._sizes |= checksums
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
        homes = self._homes(written.number, checksums)
        files = {client_file(client): sizes for client, sizes in sorted({**self._sizes, **checksums}.items())}
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
                "lost": {str(client): home for client, home in homes.items() if home != written.number},
                "settings": settings,
            }
            write_manifest(folder, content)
        except OSError as error:
            problem = f"{error.filename or folder}: cannot be written: {error.strerror}"
            print(
                f"fedmpi: the checkpoint of round {written.number} could not be written: {problem}",
                file=sys.stderr,
                flush=True,
            )
            return problem
        return None

    def _homes(self, number, present):
        """Client -> the round after which its state was written, of the checkpoint after round `number`.

        Args:
            present: the clients that are not lost.
        """
        before = self._rounds[self.done] if self._rounds else {}
        return {c: number if c in present else before.get(c) for c in range(self._job.context.num_clients)}

    def _prune(self):
        """Remove what does not belong to the newest checkpoints."""
        kept = sorted(self._rounds)[-self._job.config.run.checkpoint_keep :]
        dropped = {(c, home) for homes in self._rounds.values() for c, home in homes.items() if home is not None}
        self._rounds = {number: self._rounds[number] for number in kept}
        needed = {(client, home) for homes in self._rounds.values() for client, home in homes.items()}
        for client, home in dropped - needed:
            if client in self._job.context.clients:
                remove_client_file(self._client_folder(home, client), client)
        if self._job.link.rank == 0:
            remove_checkpoints(self._folder, kept, needed)

    def _adopt(self, manifests, newest):
        """Remember the checkpoints that there are, up to the one that the run goes on from."""
        for manifest in manifests:
            if manifest["round"] <= newest["round"]:
                homes = dict.fromkeys(range(manifest["clients"]), manifest["round"])
                homes |= {int(client): home for client, home in manifest.get("lost", {}).items()}
                self._rounds[manifest["round"]] = homes
        sizes = newest["files"]
        self._sizes = {c: tuple(sizes[client_file(c)]) for c in range(newest["clients"]) if client_file(c) in sizes}

    def _remove_clients(self, number):
        """Remove this rank's files of a checkpoint. Not collective."""
        for client in self._job.context.clients:
            remove_client_file(self._client_folder(number, client), client)

    def _read_manifests(self):
        """The manifests that are as they were written, the newest first. Not collective."""
        found = []
        for number in find_checkpoints(self._folder):
            try:
                manifest = read_manifest(checkpoint_folder(self._folder, number))
                self._recorder.check(manifest["records"], manifest["round"])
                found.append(manifest)
            except Damaged as damage:
                print(f"fedmpi: checkpoint of round {number} is damaged: {damage}", file=sys.stderr, flush=True)
        return found

    def _read_files(self, manifest):
        """The state of this rank's clients and, on rank 0, the shared one. Not collective.

        Raises:
            Damaged: if a file is not as it was written.
        """
        number, files, state = manifest["round"], manifest["files"], {}
        for client in self._job.context.clients:
            name, home = client_file(client), manifest.get("lost", {}).get(str(client), number)
            if home is None:
                continue  # lost before there was a checkpoint: it begins anew
            if name not in files:
                raise Damaged(f"there is no state of client {client}: the run had {manifest['clients']} clients")
            state |= read_state(self._find_client_folder(manifest, client, home) / name, *files[name])
        if self._job.link.rank == 0:
            folder = checkpoint_folder(self._folder, number)
            state |= read_state(folder / SERVER_STATE, *files[SERVER_STATE])
        return state

    def _find_client_folder(self, manifest, client, home):
        """The folder with a client's file after round `home`: where it would be written now, or was written then."""
        here = self._client_folder(home, client)
        pattern, rank = manifest["settings"].get("checkpoint_clients"), self._job.link.rank
        there = client_folder(pattern, self._folder, home, client, rank)
        return there if not (here / client_file(client)).exists() else here

    def _refuse(self):
        raise UserError(
            f"resume = {self._folder}: none of its checkpoints can be used; begin a new run with another --name"
        )

    def _check_settings(self, manifest):
        """Check that the settings agree with those of a checkpoint in what is learned. Not collective.

        Raises:
            UserError: one line that lists those that differ, or says that the run is longer already.
        """
        job = self._job
        now = flatten({**job.config.resolved, "clients": job.context.num_clients})
        then = flatten(manifest["settings"])
        changes = [
            f"{key} was {value}, now {now[key]}"
            for key, value in then.items()
            if key in now and now[key] != value and role(key) not in ("speed", "place") and key not in MAY_DIFFER
            and key.partition(".")[0] != "paper"
        ]  # fmt: skip
        if manifest["clients"] != job.context.num_clients:
            changes.append(f"clients was {manifest['clients']}, now {job.context.num_clients}")
        if not changes and manifest["layout"] != describe_layout(job.flat):
            changes.append("the model's parameters, or their order in memory (channels_last)")
        if changes:
            raise UserError(
                f"resume = {self._folder}: the run has other settings: {', '.join(changes)}; give the former values, "
                "or begin a new run"
            )
        if manifest["round"] > job.num_rounds:
            raise UserError(
                f"resume = {self._folder}: rounds = {job.num_rounds}, but the run has already completed "
                f"{manifest['round']} rounds: expected at least as many"
            )
        other = [f"{name} {old}" for name, old in manifest["versions"].items() if versions().get(name) != old]
        if other and job.link.rank == 0:
            print(
                f"fedmpi: the checkpoint was written with {', '.join(other)}: results may differ in the last digits",
                file=sys.stderr,
                flush=True,
            )

    def _share_state(self, state):
        """Rank 0's part of a state that all ranks share, on all ranks."""
        link = self._job.link
        mine = {name: value for name, value in state.items() if not name.startswith("clients/")}
        described = share(link, lambda: [_describe(name, value) for name, value in mine.items()])
        shared = {}
        for name, kind, value in described:
            if kind is None:
                shared[name] = value
                continue
            tensor = mine[name] if link.rank == 0 else torch.empty(value, dtype=getattr(torch, kind))
            if tensor.numel():
                link.broadcast(tensor.contiguous().numpy())
            shared[name] = tensor
        return shared


class _Writing:
    """The files of one checkpoint on their way to the disk.

    Args:
        number: of rounds. files: [(path, state)]. position: of the records. members: the ranks that write.

    Attributes:
        sizes: name -> (size, checksum) of what is written. problem: what went wrong, in one line, or None.
    """

    def __init__(self, number, files, position, members):
        self.number, self._files, self.position, self.members = number, files, position, members
        self.sizes, self.problem, self._thread = {}, None, None

    @property
    def bits(self):
        """WRITING until the end, then 0 or FAILED."""
        is_writing = self._thread is not None and self._thread.is_alive()
        return WRITING if is_writing else FAILED if self.problem else 0

    def start(self):
        """Begin to write while training goes on."""
        self._thread = threading.Thread(target=self.run, name="checkpoint", daemon=True)
        self._thread.start()

    def run(self):
        """Write the files."""
        path = None
        try:
            for path, state in self._files:
                make_folders(path.parent)
                self.sizes[path.name] = write_state(path, state)
            for folder in {path.parent for path, _ in self._files}:
                sync_folder(folder)
        except OSError as error:
            self.problem = f"{path}: {error.strerror or error}"
        except BaseException as error:  # noqa: BLE001  a thread's error is lost otherwise
            self.problem = f"{path}: {type(error).__name__}: {error}"
        self._files = []  # their memory is free from now on

    def wait(self):
        """Return when the files are written."""
        if self._thread is not None:
            self._thread.join()


def _copied(files):
    """Files with copies of their tensors."""
    return [
        (path, {name: _copy(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()})
        for path, state in files
    ]


def _copy(tensor):
    """A copy in the memory of the CPU; a large one in memory that malloc does not keep."""
    if tensor.nbytes < LARGE_TENSOR:
        return tensor.detach().cpu().clone()
    memory = torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=tensor.dtype)
    return memory.view(tensor.shape).copy_(tensor.detach())


def _available_memory():
    """Bytes of this machine's memory that can be had without swapping; 0 where Linux does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0


def _describe(name, value):
    """(name, dtype, shape) of a tensor, (name, None, value) of a number."""
    if isinstance(value, torch.Tensor):
        return [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
    return [name, None, value]
