"""A tiny random GPT-2, fine-tuned by transformers.Trainer: ``fine_tunes.py FOLDER [JSON]``.

The JSON has arguments of TrainingArguments, and those of `OURS`, which are for this program. Each rank writes what it
has found to FOLDER/found-RANK.json.
"""

import hashlib
import json
import os
import pathlib
import signal
import sys

import torch

from fedmpi.huggingface import FederatedCallback, FederatedTrainer

import transformers  # isort: skip
from mpi4py import MPI
from peft import LoraConfig, get_peft_model

OURS = {
    "federation": {"every": 5},  # arguments of the callback, or, with an algorithm, of the trainer
    "resume": False,  # or a path
    "saves": [],  # steps after which all kinds of files are written
    "kill": None,  # [rank, step]
    "lora": True,
    "dtype": "float32",
    "dropout": 0.1,
    "checkpointing": None,  # gradient checkpointing: "reentrant" or "plain"
    "quantised": False,  # whether the base is emulated in 8 bits
    "evaluates": False,
    "numbers": [64, 64],  # texts of each rank
    "adds": False,  # whether the callback is added later
    "fails": None,  # a rank that fails before it makes the Trainer
    "stops_early": False,  # by a callback before ours, and each rank's own accuracy
}
DEFAULTS = {"max_steps": 20, "save_steps": 5, "logging_steps": 5, "learning_rate": 1e-2}
RANK = MPI.COMM_WORLD.rank


class Killing(transformers.TrainerCallback):
    """Kills a rank after a step: [rank, step]."""

    def __init__(self, victim):
        self.victim = victim

    def on_step_end(self, args, state, control, **_):
        if [RANK, state.global_step] == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)


class Saving(transformers.TrainerCallback):
    """Writes the model in all ways after some steps."""

    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step in self.steps:
            folder = self.folder / f"step-{state.global_step}-rank-{RANK}"
            model.save_pretrained(folder)
            torch.save(model.state_dict(), folder / "state.pt")
            torch.save(model, folder / "model.pt")


class Int8(torch.nn.Module):
    """An emulated quantised layer: weights of 8 bits, which are no floating-point numbers, and a scale."""

    def __init__(self, layer):
        super().__init__()
        self.scale = torch.nn.Parameter(layer.weight.abs().max().detach() / 127, requires_grad=False)
        words = (layer.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(words, requires_grad=False)
        self.bias = torch.nn.Parameter(layer.bias.detach(), requires_grad=False)

    def forward(self, inputs):
        return inputs @ (self.weight.to(inputs.dtype) * self.scale) + self.bias


def make_model(chosen):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), chosen["dropout"])
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, **tokens))
    model = model.to(getattr(torch, chosen["dtype"]))
    if chosen["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": chosen["checkpointing"] == "reentrant"})
        model.enable_input_require_grads()
    if chosen["quantised"]:
        for block in model.transformer.h:
            block.mlp.c_fc = Int8(block.mlp.c_fc)
    if chosen["lora"]:
        lora = {"r": 4, "lora_alpha": 8, "lora_dropout": chosen["dropout"], "target_modules": ["c_attn"]}
        model = get_peft_model(model, LoraConfig(**lora, fan_in_fan_out=True, task_type="CAUSAL_LM"))
    return model


def texts(silo, number):
    """Each silo counts in steps of its own, from anywhere."""
    draw = torch.Generator().manual_seed(silo)
    words = (torch.randint(64, (number, 1), generator=draw) + (silo % 10 + 1) * torch.arange(12)) % 64
    return [{"input_ids": row, "labels": row} for row in words]


def digest(tensors):
    joined = b"".join(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(joined).hexdigest()[:16]


def main():
    folder, given = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")
    chosen = {name: given.pop(name, value) for name, value in OURS.items()}
    fixed = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4}
    args = transformers.TrainingArguments(str(folder), **{**fixed, **DEFAULTS, **given})
    model = make_model(chosen)
    base = [p for p in model.parameters() if not p.requires_grad]
    before, size = digest(base), sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    common = {
        "train_dataset": texts(RANK, chosen["numbers"][RANK]),
        "eval_dataset": texts(RANK + 10, 16) * chosen["evaluates"] or None,
    }
    if chosen["fails"] == RANK:
        raise RuntimeError("fails by itself")
    federation, others = chosen["federation"], [Killing(chosen["kill"]), Saving(folder, chosen["saves"])]
    if "algorithm" in federation:
        trainer = FederatedTrainer(model, args, federation=federation, callbacks=others, **common)
        callback = trainer.joining
    else:
        callback = FederatedCallback(**federation)
        first = [] if chosen["adds"] else [callback]
        if chosen["stops_early"]:
            first.insert(0, transformers.EarlyStoppingCallback(1))
            common["compute_metrics"] = lambda _: {"accuracy": float(RANK)}
        trainer = transformers.Trainer(model, args, callbacks=[*first, *others], **common)
        if chosen["adds"]:
            trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=chosen["resume"] or None)
    trainer.save_model(os.path.join(args.output_dir, "final"))
    entries = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    found = {
        "trained": digest(p for p in model.parameters() if p.requires_grad),
        "dtypes": sorted({str(p.dtype) for p in model.parameters() if p.requires_grad}),
        "base_stays": digest(base) == before,
        "trained_bytes": size,
        "accounts": callback.fed.accounts(),
        "output_dir": args.output_dir,
        "loss": entries["loss"],
        "best": [trainer.state.best_metric, trainer.state.best_global_step],
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    }
    (folder / f"found-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
