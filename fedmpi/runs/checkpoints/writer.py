"""When a run writes checkpoints. All functions are collective unless they say otherwise.

Each rank writes the state of its own clients, rank 0 also the state that all share. If memory allows, the state is
copied between two rounds and a thread writes the copy while training goes on. When the ranks have reported in their
round messages that all have written, rank 0 completes the checkpoint by its manifest.
"""

import mmap
import pathlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import torch

from fedmpi.comm.agreement import agree
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import write_mark
from fedmpi.ground.files.run_files import SERVER_STATE, had_checkpoints
from fedmpi.ground.machine.memory import available_memory
from fedmpi.ground.text import Log
from fedmpi.oracles.architecture import as_json
from fedmpi.runs.checkpoints.files import (
    checkpoint_folder,
    client_file,
    describe_layout,
    make_checkpoint_folder,
    make_folders,
    own_place,
    remove_checkpoints,
    remove_state,
    sync_folder,
    unique_name,
    write_manifest,
    write_state,
)
from fedmpi.runs.checkpoints.resume import resume
from fedmpi.runs.checkpoints.within import LONG, CheckpointWithin
from fedmpi.runs.loop.run import Run
from fedmpi.runs.settings import FolderSettings

log = Log(__name__)

DUE, WRITING, FAILED, LASTING = 8, 16, 32, 512  # bits of `Federation.requests`, beside those of `comm.job.signals`
SHARE_OF_ROUND = (
    0.05  # of a round that is `LONG`: for which the ranks wait for files, so that they need not be in doubt
)
SHARE_OF_MEMORY = 0.5  # of what is available to the job on the node, for the copies of all its ranks
UNKNOWN = 64 << 20  # bytes that are copied where the system does not say what is available
LARGE_TENSOR = 1 << 20  # bytes; copies go into memory of their own, which returns to the system

States: TypeAlias = dict[pathlib.Path, dict[str, Any]]  # of files that are written
Files: TypeAlias = dict[int, list[int] | None]  # client -> round after which its file was written, size, checksum


class Checkpoints:
    """The checkpoints of one run.

    Args:
        run: a `fedmpi.runs.loop.run.Run`. settings: a `FolderSettings`.
        own: function without arguments: the state of the run's loop: name -> number.
        check: called before each checkpoint; it raises an error on all ranks if the state is not a good one.

    Raises:
        AgreedUserError: on every rank, if the folder of the clients' state cannot be made.
    """

    def __init__(
        self,
        run: Run,
        settings: FolderSettings,
        own: Callable[[], Mapping[str, Any]] = dict,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._run, self._settings, self._own, self._check = run, settings, own, check
        self._clients_folder = settings.checkpoint_clients
        if not settings.checkpoint_clients and not run.federation.aggregation.exposes_rows:
            self._clients_folder = str(agree(run.link, self._make_own_place))
        self._run_name = unique_name(run.folder, run.identity)
        # Round after which there is a complete checkpoint -> client -> (round after which its file was written, size,
        # checksum): of a lost client an earlier one, or None.
        self._complete: dict[int, Files] = {}
        self._thread: _Writer | None = None
        self._began = time.monotonic()
        self._looked, self._seconds = self._began, 0.0  # when the last round ended; seconds of the current one
        self.within = CheckpointWithin(run, self._clients_folder, own)
        agree(run.link, self._make_client_folders)

    @property
    def done(self) -> int | None:
        """Number of rounds after which the newest checkpoint was made; None if there is none."""
        return max(self._complete, default=None)

    def request(self) -> int:
        """This rank's bits of `Federation.requests`; rank 0's clock decides when one is due. Not collective."""
        now, minutes, is_first = time.monotonic(), self._settings.checkpoint_minutes, self._run.link.rank == 0
        self._seconds = now - self._looked
        bits = LASTING if is_first and self._seconds >= LONG else 0
        if self._thread is not None:
            return bits | (WRITING if self._thread.is_alive() else FAILED if self._thread.problem else 0)
        is_due = is_first and minutes > 0 and now - self._began >= 60 * minutes
        return bits | (DUE if is_due else 0)

    def is_due(self) -> bool:
        """Complete what is written; whether a checkpoint is due after this round, which `begin` may write then."""
        federation, every, self._looked = self._run.federation, self._settings.checkpoint_every, time.monotonic()
        if self._thread is not None and not federation.requests & WRITING:
            self._end(self._thread, federation.requests & FAILED)
        is_due = bool(federation.requests & DUE or (every and federation.round_index % every == 0))
        if is_due:
            self.finish()
        return is_due

    def begin(self) -> None:
        """Begin to write the current state; without memory for a copy, write all of it before returning."""
        self._check()
        run, link = self._run, self._run.link
        self._began, number, state, files = time.monotonic(), run.federation.round_index, run.state(), {}
        for client in run.clients:
            own_state = {name: value for name, value in state.items() if name.startswith(f"clients/{client}/")}
            files[self._client_file(number, client)] = own_state
        if link.rank == 0:
            shared = {name: value for name, value in state.items() if not name.startswith("clients/")}
            shared |= {f"loop/{name}": value for name, value in self._own().items()}
            files[checkpoint_folder(run.folder, number) / SERVER_STATE] = shared
        recorder = run.recorder()
        position = recorder.position() if recorder else None
        copies = _copied(files, link.local_size)
        self._thread = thread = _Writer(number, copies or files, position, link.members, run.identity)
        thread.start()
        if copies is None:
            thread.join()
        if run.federation.requests & LASTING:
            thread.join(SHARE_OF_ROUND * self._seconds)
            found = link.allgather([thread.is_alive(), bool(thread.problem)], "checkpoints")
            if not found[:, 0].any():
                self._end(thread, found[:, 1].any())

    def write_now(self) -> bool:
        """Write a checkpoint of the current state, unless there is one, and wait for it; whether there is one then."""
        self.finish()
        members = None
        while self.done != self._run.federation.round_index and members != self._run.link.members:
            members = self._run.link.members  # again, if a rank is lost meanwhile
            self.begin()
            self.finish()
        return self.done == self._run.federation.round_index

    def finish(self) -> None:
        """Wait for what is being written, and complete it."""
        if self._thread is not None:
            self._thread.join()
            found = self._run.link.allgather([bool(self._thread.problem)], "checkpoints")
            self._end(self._thread, found.any())

    def restore(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the state of the training loop, the manifest) of the newest checkpoint that is not damaged; see `resume`."""
        loop, manifests = resume(self._run, self._clients_folder, self._run_name, self.within)
        for manifest in manifests[1:] if "within" in manifests[0] else manifests:
            self._complete[manifest["round"]] = {int(client): file for client, file in manifest["clients"].items()}
        return loop, manifests[0]

    def _make_own_place(self) -> pathlib.Path:
        """The folder in which this rank keeps its clients' files if the run hides rows and no folder is given."""
        place = own_place()
        try:
            make_folders(place.parent)
            place.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UserError(f"checkpoint_clients: {error.filename}: cannot be created: {error.strerror}") from None
        if self._run.link.rank == 0:
            log.warning(
                f"{self._run.federation.aggregation.called}: for checkpoints each rank keeps its clients' rows in a "
                f"folder of its user, {place}, not in the run folder; --checkpoint_clients names another one"
            )
        return place

    def _make_client_folders(self) -> None:
        for client in self._run.clients if self._clients_folder else ():
            try:
                make_folders(self._client_file(0, client).parent.parent)
            except OSError as error:
                raise UserError(f"checkpoint_clients: {error.filename}: cannot be created: {error.strerror}") from None

    def _client_file(self, round_index: int, client: int) -> pathlib.Path:
        pattern, rank = self._clients_folder, self._run.link.rank
        return client_file(pattern, self._run.folder, round_index, client, rank, self._run_name)

    def _end(self, written: "_Writer", failed: object) -> None:
        """List the files that all ranks have written in a manifest, or remove them if one could not be written."""
        link, self._thread = self._run.link, None
        self._report(written)
        clients = {} if failed else self._allgather_clients(written)
        failed = failed or link.members != written.members  # a file of a lost rank may be missing
        if not failed and link.rank == 0:
            written.problem = self._write_manifest(written, clients)
            self._report(written)
        if not failed and link.first_rank_where(bool(written.problem)) is None and link.members == written.members:
            self._complete[written.number] = clients
        else:
            for client in self._run.clients:
                remove_state(self._client_file(written.number, client))
        self._prune()

    def _report(self, written: "_Writer") -> None:
        if written.problem:
            kept = "there is no other one yet" if self.done is None else f"the last one is that of round {self.done}"
            message = f"the checkpoint of round {written.number} could not be written: {written.problem}; {kept}"
            log.warning(message)

    def _allgather_clients(self, written: "_Writer") -> Files:
        """See `_complete`: of the checkpoint that is written now."""
        paths = {client: self._client_file(written.number, client) for client in self._run.clients}
        own_rows = [(client, *written.sizes[path.name]) for client, path in paths.items()]
        numbers = [number for row in own_rows for number in row]
        everyone = self._run.link.allgatherv(numbers, "checkpoints").reshape(-1, 3).astype(int)
        present = {client: [written.number, *sizes] for client, *sizes in everyone.tolist()}
        before = {} if self.done is None else self._complete[self.done]
        return {**dict.fromkeys(range(self._run.num_clients)), **before, **present}

    def _write_manifest(self, written: "_Writer", clients: Files) -> str | None:
        """Complete the checkpoint on rank 0; returns what went wrong, or None. Not collective."""
        run, folder = self._run, checkpoint_folder(self._run.folder, written.number)
        content = {
            "round": written.number,
            "rounds": run.num_rounds,
            "ranks": run.link.size,
            "layout": describe_layout(run.flat),
            "architecture": as_json(run.flat.architecture),
            "records": written.position,
            "server": written.sizes[SERVER_STATE],
            "clients": {str(client): file for client, file in clients.items()},
            "settings": run.settings,
            "run_name": self._run_name,
        }
        try:
            if recorder := run.recorder():
                recorder.check_lock()
                recorder.sync()
            sync_folder(run.folder.absolute().parent)
            write_manifest(folder, content)
            if not had_checkpoints(run.folder):
                write_mark(run.folder, "run", run.identity, checkpoints=True)
        except OSError as error:
            return f"{error.filename or folder}: cannot be written: {error.strerror}"
        return None

    def _prune(self) -> None:
        """Remove what does not belong to the newest checkpoints."""
        before = self._files()
        kept = sorted(self._complete)[-self._settings.checkpoint_keep :]
        self._complete = {number: self._complete[number] for number in kept}
        needed = self._files()
        for client, number in before - needed:
            if client in self._run.clients:
                remove_state(self._client_file(number, client))
        if self._run.link.rank == 0:
            remove_checkpoints(self._run.folder, kept, needed)
        if self._complete:
            self.within.remove(max(self._complete))
        self._run.link.barrier()  # a rank that began the next checkpoint earlier would lose its files to rank 0

    def _files(self) -> set[tuple[int, int]]:
        """The (client, round after which it was written) of all files of complete checkpoints."""
        return {(client, file[0]) for files in self._complete.values() for client, file in files.items() if file}


class _Writer(threading.Thread):
    """Writes the files of one checkpoint.

    Attributes:
        number: of rounds. position: where the records end. members: the ranks that write.
        sizes: name -> (bytes, checksum) of the files written so far. problem: what went wrong, in one line, or None.
    """

    def __init__(
        self, number: int, files: States, position: int | None, members: Collection[int], identity: str
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.number, self.position, self.members = number, position, members
        self._files, self._identity = files, identity
        self.sizes: dict[str, tuple[int, int]] = {}
        self.problem: str | None = None

    def run(self) -> None:
        path = None
        try:
            for path, state in self._files.items():
                make_checkpoint_folder(path.parent, self._identity)
                self.sizes[path.name] = write_state(path, state)
            for folder in {path.parent for path in self._files}:
                sync_folder(folder)
        except OSError as error:
            self.problem = f"{path}: {error.strerror or error}"
        except BaseException as error:  # noqa: BLE001  a thread's error is lost otherwise
            self.problem = f"{path}: {type(error).__name__}: {error}"
        self._files = {}  # their memory is free from now on


def _copied(files: States, num_ranks: int) -> States | None:
    """Files with copies of their tensors; None without memory for that on this machine, which the ranks share."""
    tensors = [value for state in files.values() for value in state.values() if isinstance(value, torch.Tensor)]
    available = available_memory(num_ranks)
    if sum(value.nbytes for value in tensors) > (UNKNOWN if available is None else SHARE_OF_MEMORY * available):
        return None
    return {path: {name: _copy(value) for name, value in state.items()} for path, state in files.items()}


def _copy(value: Any) -> Any:
    """A copy in the memory of the CPU; a large one in memory that malloc does not keep."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.nbytes < LARGE_TENSOR:
        return value.detach().cpu().clone()
    memory = torch.frombuffer(mmap.mmap(-1, value.nbytes), dtype=value.dtype)
    return memory.view(value.shape).copy_(value.detach())
