"""The checkpoint within a round: each rank's whole state in a file of its own.

    checkpoints/within-0/manifest.json           as of other checkpoints; "clients" has the files of ranks
    checkpoints/within-0/rank-0003.safetensors   all that this rank needs to go on

There are two such folders; the one with the older checkpoint is written to. They are removed when a checkpoint after
their round is complete. As many ranks read one as have written it.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

from fedmpi.comm.agreement import share
from fedmpi.ground.files.own_files import remove, write_mark
from fedmpi.ground.files.run_files import CHECKPOINTS, MANIFEST, had_checkpoints
from fedmpi.ground.files.run_files import WITHIN as FOLDERS
from fedmpi.ground.text import Log
from fedmpi.oracles.architecture import as_json
from fedmpi.runs.checkpoints.files import (
    Damaged,
    client_file,
    describe_layout,
    make_checkpoint_folder,
    read_manifest,
    read_state,
    sync_folder,
    unique_name,
    write_manifest,
    write_state,
)
from fedmpi.runs.loop.run import Run

log = Log(__name__)

LONG = 3.0  # seconds of a round, after which it is left within; and from which on the next one can be


class CheckpointWithin:
    """The checkpoint within a round of one run. Collective.

    Args:
        run: a `Run`. pattern: see `client_file`. own: the state of the run's loop: name -> number.
    """

    def __init__(self, run: Run, pattern: str | None, own: Callable[[], Mapping[str, Any]]) -> None:
        self._run, self._pattern, self._own = run, pattern, own
        self._run_name = unique_name(run.folder, run.identity)
        self._count, self._round = 0, 0  # of the newest one: its number, from 1, and the rounds before it

    def _folder(self, place: int) -> Any:
        return self._run.folder / CHECKPOINTS / FOLDERS[place]

    def _file(self, place: int) -> Any:
        rank = self._run.link.rank
        name = f"rank-{rank:04d}.safetensors"
        if self._pattern is None or not self._run.clients:
            return self._folder(place) / name
        other = client_file(self._pattern, self._run.folder, 0, self._run.clients[0], rank, self._run_name)
        return other.parent.parent / FOLDERS[place] / name

    def write(self, state: Mapping[str, Any]) -> Generator[list[float], Any, bool]:
        """Write all ranks' states, in place of the older of two; returns whether that was possible on all.

        A generator of what all ranks `allgather` next, to which the result is sent: a loop may do something else
        meanwhile.
        """
        run, place = self._run, _place(self._count + 1)
        if run.link.rank == 0:
            remove(self._folder(place), [MANIFEST])
        yield [0.0]
        own = {f"loop/{name}": value for name, value in self._own().items()} if run.link.rank == 0 else {}
        path, problem, sizes = self._file(place), "", (0, 0)
        try:
            make_checkpoint_folder(path.parent, run.identity)
            sizes = write_state(path, {**state, **own})
            sync_folder(path.parent)
        except OSError as error:
            problem = f"{path}: {error.strerror or error}"
            log.warning(f"the checkpoint within round {run.federation.round_index + 1} could not be written: {problem}")
        found: Any = yield [bool(problem), *sizes]
        everyone = found.astype(int).tolist()
        is_written = not any(row[0] for row in everyone)
        if is_written and run.link.rank == 0:
            is_written = self._write_manifest(place, [row[1:] for row in everyone])
        found = yield [is_written]
        is_written = bool(found.all())
        if is_written:
            self._count, self._round = self._count + 1, run.federation.round_index
        return is_written

    def _write_manifest(self, place: int, files: list[list[int]]) -> bool:
        """Complete it, on rank 0; whether that was possible. Not collective."""
        run, recorder = self._run, self._run.recorder()
        number = run.federation.round_index
        content = {
            "round": number,
            "rounds": run.num_rounds,
            "ranks": run.link.size,
            "within": self._count + 1,
            "layout": describe_layout(run.flat),
            "architecture": as_json(run.flat.architecture),
            "records": recorder.position() if recorder else 0,
            "server": [0, 0],
            "clients": {str(rank): [number, *file] for rank, file in enumerate(files)},
            "settings": run.settings,
            "run_name": self._run_name,
        }
        try:
            if recorder:
                recorder.check_lock()
                recorder.sync()
            make_checkpoint_folder(self._folder(place), run.identity)
            write_manifest(self._folder(place), content)
            if not had_checkpoints(run.folder):
                write_mark(run.folder, "run", run.identity, checkpoints=True)
        except OSError as error:
            log.warning(f"{error.filename or self._folder(place)}: cannot be written: {error.strerror}")
            return False
        return True

    def remove(self, number: int) -> None:
        """Remove both if their round has ended: the checkpoint after `number` rounds is complete."""
        if self._count and number > self._round:
            for place in range(len(FOLDERS)) if self._run.link.rank == 0 else ():
                with contextlib.suppress(OSError):
                    remove(self._folder(place), [MANIFEST])
            self._run.link.barrier()
            for place in range(len(FOLDERS)):
                path = self._file(place)
                with contextlib.suppress(OSError):
                    remove(path.parent, [path.name], with_folder=True)
            self._count = 0

    def find(self, after: int) -> list[dict[str, Any]]:
        """Manifests of those that go on after at least `after` rounds, the newest first; the same on all ranks."""
        found: list[dict[str, Any]] = share(self._run.link, lambda: self._find(after))
        if found:
            self._count, self._round = found[0]["within"], found[0]["round"]
        for manifest in found:
            if len(manifest["clients"]) != self._run.link.size:
                if self._run.link.rank == 0:
                    log.warning(
                        f"the checkpoint within round {manifest['round'] + 1} is that of {len(manifest['clients'])} "
                        f"ranks, and this run has {self._run.link.size}: it is not used"
                    )
                return []
        return found

    def _find(self, after: int) -> list[dict[str, Any]]:
        manifests = []
        for place in range(len(FOLDERS)):
            with contextlib.suppress(Damaged):
                manifest = read_manifest(self._folder(place))
                if manifest["round"] >= after and type(manifest.get("within")) is int:
                    manifests.append(manifest)
        return sorted(manifests, key=lambda found: (found["round"], found["within"]), reverse=True)

    def read(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's state. Not collective.

        Raises:
            Damaged: if its file is missing, or differs from what was written.
        """
        _, *file = manifest["clients"][str(self._run.link.rank)]
        return dict(read_state(self._file(_place(manifest["within"])), *file))


def _place(number: int) -> int:
    """In which of the folders the checkpoint with this number is."""
    return (number - 1) % len(FOLDERS)
