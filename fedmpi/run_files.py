"""Names of the files in a run folder, for everything that writes or reads one."""

SETTINGS = "settings.yaml"  # the run as resolved; `--config` repeats it
RECORDS = "metrics.jsonl"  # one line of JSON per round, see `fedmpi.runs.record`
MODEL = "model.safetensors"  # the trained tensors under their names; written last: with it a run is complete
FORMER_MODEL = "model.pt"  # the same in runs of earlier versions, for torch.load(..., weights_only=True)
MODEL_DESCRIPTION = "model.json"  # how to build the model again and what its inputs are
MODEL_AND_ROWS = "model.h5"  # the same tensors, and the algorithm's rows x, m, v, ...
PARTITION = "partition.h5"  # which samples each client has
DIVERGED = "diverged.txt"  # why a run ended without a result, in one line
ATTACK_FIGURE = "attack.png"  # images before and after a black-box attack
