"""A tiny random GPT-2 with LoRA adapters, fine-tuned by transformers.Trainer: the arguments say how.

    fine_tunes.py FOLDER [name=value ...]

Names: of TrainingArguments; those of `OURS` are for this program.
"""

import ast
import hashlib
import json
import os
import pathlib
import signal
import sys

import torch

import fedmpi
from fedmpi.huggingface import FederatedCallback, FederatedTrainer

import transformers  # isort: skip
from peft import LoraConfig, get_peft_model  # isort: skip

OURS = {"every": 5, "exchange": (), "outer": "none", "algorithm": "", "samples": 64, "resume": False, "kill": None}
OURS |= {"lora": True, "tied": True, "dtype": "float32", "dropout": 0.1, "checkpointing": False, "freeze": None}
OURS |= {"evaluates": False, "seed_of_data": None}


class Killing(transformers.TrainerCallback):
    """Kills a rank after a step: [rank, step]."""

    def __init__(self, rank, victim):
        self.rank, self.victim = rank, victim

    def on_step_end(self, args, state, control, **_):
        if [self.rank, state.global_step] == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)


def make_model(chosen):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), chosen["dropout"])
    config = transformers.GPT2Config(**sizes, **dropout, tie_word_embeddings=chosen["tied"], bos_token_id=0,
                                     eos_token_id=0, pad_token_id=0)  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).to(getattr(torch, chosen["dtype"]))
    if chosen["lora"]:
        lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=chosen["dropout"], target_modules=["c_attn"], task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    return model


def texts(rank, number):
    """Each silo counts in steps of its own, from anywhere."""
    draw = torch.Generator().manual_seed(rank)
    begins = torch.randint(64, (number, 1), generator=draw)
    words = (begins + (rank + 1) * torch.arange(12)) % 64
    return [{"input_ids": row, "labels": row} for row in words]


def digest(tensors):
    joined = b"".join(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(joined).hexdigest()[:16]


def main():
    folder, *words = sys.argv[1:]
    given = dict(word.split("=", 1) for word in words)
    given = {name: ast.literal_eval(value) if value[:1] in "([{0123456789-TFN.'" else value for name, value in given.items()}
    chosen = {name: given.pop(name, value) for name, value in OURS.items()}
    rank = int(os.environ.get("FINE_TUNES_RANK", -1))
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    given = {"max_steps": 20, "save_steps": 5, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 5, **given}
    args = transformers.TrainingArguments(folder, report_to="none", use_cpu=True, disable_tqdm=True, **given)
    model = make_model(chosen)
    if chosen["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": chosen["checkpointing"] == "reentrant"})
        model.enable_input_require_grads()
    base = [p for p in model.parameters() if not p.requires_grad]
    before = digest(base)
    data = texts(rank, chosen["samples"])
    evaluation = {"eval_dataset": texts(rank + 10, 16)} if chosen["evaluates"] else {}
    killing = Killing(rank, chosen["kill"])
    sizes = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
    if chosen["algorithm"]:
        federation = {"algorithm": chosen["algorithm"], "local_steps": chosen["every"]}
        trainer = FederatedTrainer(model, args, train_dataset=data, federation=federation, callbacks=[killing], **evaluation)
        callback = trainer.joining
    else:
        settings = {name: chosen[name] for name in ("every", "exchange", "outer")}
        callback = FederatedCallback(**settings)
        trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[callback, killing], **evaluation)
    result = trainer.train(resume_from_checkpoint=chosen["resume"] or None)
    trainer.save_model(str(pathlib.Path(args.output_dir) / "final"))
    found = {
        "rank": rank,
        "trained": digest(p for p in model.parameters() if p.requires_grad),
        "base": digest(base) == before,
        "adapter_bytes": sum(sizes),
        "accounts": callback.fed.accounts(),
        "output_dir": args.output_dir,
        "loss": result.training_loss,
        "logs": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "best": trainer.state.best_metric,
        "optimizer": type(trainer.optimizer.optimizer).__name__,
    }
    pathlib.Path(folder).mkdir(exist_ok=True, parents=True)
    (pathlib.Path(folder) / f"found-{rank}.json").write_text(json.dumps(found))
    assert isinstance(callback.fed, object) and fedmpi


if __name__ == "__main__":
    main()
