"""Settings of the data: who has which, and how they are read."""

import dataclasses
import os

from fedmpi.ground.settings import Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(Section):
    """The clients, their data, and the minibatches that are drawn from them."""

    clients: int | None = setting(None, "N, number of clients (silos); default: one per rank", least=1, most=1_000_000)
    weighting: str = setting(
        "uniform",
        "weight of a client in every average: the same for all (uniform), or its number of training samples (samples)",
        among=("uniform", "samples"),
    )
    data_dir: str | None = setting(
        None, "folder of data files; default: the environment variable FEDMPI_DATA", role="place", per_rank=True
    )
    holdout: float = setting(
        0.0, "share of every client's training data that is held out: used for evaluation only", least=0, below=1
    )
    batch_size: int = setting(50, "b, samples in a minibatch", least=1)
    last_batch: str = setting(
        "keep",
        "the samples that are left at the end of a pass are a smaller minibatch (keep; a single "
        "one joins the minibatch before it if the model has batch norm), join the one before (merge), or wait (drop)",
        among=("keep", "merge", "drop"),
    )
    first_batch_size: int | None = setting(
        None,
        "B, samples in the minibatch of a gradient before the first step, if the algorithm uses one; default: b",
        least=1,
    )
    least: int = setting(
        2,
        "of texts with a file per silo: a word is known, and sent to all, if the training texts of at least so many "
        "silos contain it; others are unknown; 5 is recommended; 1: all words of all silos are sent",
        least=1,
        role="problem",
    )
    scores: str = setting(
        "auto",
        "how AUC and other metrics of the order of scores are computed: from numbers of samples in 1,000 bins (bins), "
        "or from every sample's outputs and label, which all ranks then receive (samples); auto: bins if each silo has "
        "tests of its own, else samples",
        among=("auto", "bins", "samples"),
        role="speed",
    )
    seed: int = setting(0, "seed of all random numbers", least=0, role="seed")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_dir is None:
            object.__setattr__(self, "data_dir", os.environ.get("FEDMPI_DATA") or None)
