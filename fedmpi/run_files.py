"""Names of the files in a run folder, for everything that writes or reads one."""

SETTINGS = "settings.yaml"  # the run as resolved; `--config` repeats it
RECORDS = "metrics.jsonl"  # one line of JSON per round, see `fedmpi.runs.record`
MODEL = "model.safetensors"  # the trained tensors under their names; named last: with it a run is complete
FORMER_MODEL = "model.pt"  # the same in runs of earlier versions, for torch.load(..., weights_only=True)
MODEL_DESCRIPTION = "model.json"  # how to build the model again and what its inputs are
MODEL_AND_ROWS = "model.h5"  # the same tensors, and the algorithm's rows x, m, v, ...
CLIENTS = "clients.json"  # the clients' names (or null) and numbers of training samples
DATA_FILES = "data.json"  # a salt, and a salted checksum of each data file
CLIENT_MODEL = "models/client_{client}.safetensors"  # of a run with personal layers: each client's own model
PARTITION = "partition.h5"  # which samples each client has
DIVERGED = "diverged.txt"  # why a run ended without a result, in one line
ROC = "roc.csv"  # of a run that maximises AUC: the result's ROC curve on the test set
ATTACK_FIGURE = "attack.png"  # images before and after a black-box attack
CHECKPOINTS = "checkpoints"  # a folder for each checkpoint, named after its round: 000120
MANIFEST = "manifest.json"  # in such a folder, written last: with it a checkpoint is complete
SERVER_STATE = "server.h5"  # beside it: the state that all ranks share
BEST_SO_FAR = "kept.h5"  # the best model of a run that diverged later, in the layout of MODEL_AND_ROWS
