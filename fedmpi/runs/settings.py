"""Settings of the run folder and its checkpoints."""

import dataclasses

from fedmpi.ground.errors import UserError
from fedmpi.ground.files.run_files import RUNS
from fedmpi.ground.settings import MANY, Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderSettings(Section):
    """Where a run is recorded, when its checkpoints are written, and which run it continues."""

    out: str = setting(
        RUNS, "folder in which rank 0 creates the run folder", role="place", per_rank=True, each_start=True
    )
    name: str | None = setting(
        None, "name of the run folder; default: algorithm, data and a number", role="place", each_start=True
    )
    track: str | None = setting(
        None,
        "also record the run in tensorboard, wandb (offline unless WANDB_MODE is set) or mlflow; separate several by "
        "commas",
        role="place",
    )
    resume: str | None = setting(
        None,
        "continue the run in this run folder from its last checkpoint, with its settings; auto: the folder that --out "
        "and --name give, or a new run if that has no checkpoint",
        role="place",
        each_start=True,
    )
    checkpoint_every: int | None = setting(
        None, "rounds between checkpoints; default: only by time, see --checkpoint_minutes", least=1, role="place"
    )
    checkpoint_minutes: float = setting(
        10.0, "minutes between checkpoints; 0 switches these off", least=0, most=MANY, role="place"
    )
    checkpoint_keep: int = setting(2, "how many checkpoints are kept; older ones are removed", least=1, role="place")
    checkpoint_clients: str | None = setting(
        None,
        "folder for the state that only a client has; its path may contain {client} and {rank}; default: in the run "
        "folder; with aggregation masked, ~/.local/state/fedmpi/checkpoints of each rank's user",
        role="place",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None and (self.name in ("", ".", "..") or "/" in self.name):
            raise UserError(f"name = {self.name}: expected the name of a folder, not a path; --out says where it is")
        folder = self.checkpoint_clients or ""
        if {*"{}"} & {*folder.replace("{client}", "").replace("{rank}", "")}:
            raise UserError(
                f"checkpoint_clients = {folder}: expected a path with {{client}}, {{rank}} and nothing else in braces"
            )
