"""Trainings by transformers.Trainer, each whole and then resumed from its middle: ``resumes_trainers.py FOLDER``.

Rank 0 prints a line for each of `CASES`, as JSON: [name, the trained parameters' digests of all ranks, those of the
resumed training]. To be resumed, a training loses its later checkpoints, as if it had been killed before them.
"""

import json
import os
import pathlib
import shutil
import sys

from fedmpi.huggingface import FederatedCallback

import fine_tunes  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip
from mpi4py import MPI

comm = MPI.COMM_WORLD
MODEL = {"lora": True, "dtype": "float32", "dropout": 0.1, "checkpointing": None, "quantised": False}
FREEZE = {"freeze": "*lora_A*"}
CASES = {  # name -> (arguments of the callback, of `make_model`, of TrainingArguments, texts of a stream or None)
    "frozen factors, schedule, accumulation": (
        FREEZE, {}, {"lr_scheduler_type": "cosine", "warmup_steps": 3, "gradient_accumulation_steps": 2}, None,
    ),
    "autocast": ({}, {}, {"bf16": True, "gradient_accumulation_steps": 3}, None),
    "16-bit parameters": ({}, {"lora": False, "dtype": "bfloat16"}, {}, None),
    "16-bit adapters": ({}, {"dtype": "bfloat16"}, {"bf16": True}, None),
    "stream": ({}, {}, {"gradient_accumulation_steps": 2}, 200),
    "a schedule by evaluations": (
        {}, {}, {
            "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0},
            "eval_strategy": "steps", "eval_steps": 4,
        }, None,
    ),
    "without clipping": ({}, {}, {"max_grad_norm": 0.0, "optim": "sgd"}, None),
    "stream between averages": ({"every": 3, **FREEZE}, {}, {}, 200),
}  # fmt: skip


class Stream(torch.utils.data.IterableDataset):
    """The texts of a silo, without a length."""

    def __init__(self, number):
        self.number = number

    def __iter__(self):
        return iter(fine_tunes.texts(comm.rank, self.number))


def trained(federation, model, given, number, resume):
    """The digest of the trained parameters."""
    args = transformers.TrainingArguments(
        "out", **{"max_steps": 16, "save_steps": 4, "learning_rate": 5e-3, "per_device_train_batch_size": 4, **given},
        report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    model = fine_tunes.make_model({**MODEL, **model})
    data = Stream(number) if number else fine_tunes.texts(comm.rank, 40 + 13 * comm.rank)
    trainer = transformers.Trainer(
        model, args, train_dataset=data, eval_dataset=fine_tunes.texts(10 + comm.rank, 8),
        callbacks=[FederatedCallback(**federation)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    return fine_tunes.digest(parameter for parameter in model.parameters() if parameter.requires_grad)


def main():
    folder = pathlib.Path(sys.argv[1])
    for name, case in CASES.items():
        own = folder / name
        own.mkdir(parents=True, exist_ok=True)
        os.chdir(own)
        whole = trained(*case, resume=False)
        comm.Barrier()
        if comm.rank == 0:
            for step in (12, 16):
                for path in own.glob(f"out/**/checkpoint-{step}"):
                    shutil.rmtree(path)
        comm.Barrier()
        digests = comm.gather([whole, trained(*case, resume=True)])
        if comm.rank == 0:
            print(json.dumps([name, *zip(*digests)]), flush=True)


if __name__ == "__main__":
    main()
