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
    "labelled": [12, 12],  # words of each of its texts, the last ones, that have a label
    "pooled": False,  # whether one process has the texts of all ranks, and no callback
    "rates": None,  # learning rates of the ranks
    "adds": False,  # whether the callback is added later
    "fails": None,  # a rank that fails before it makes the Trainer
    "sft": False,  # whether the Trainer is TRL's SFTTrainer
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

    trainer = None

    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step in self.steps:
            folder = self.folder / f"step-{state.global_step}-rank-{RANK}"
            model.save_pretrained(folder)
            self.trainer.save_model(str(folder / "saved"))
            self.trainer.accelerator.save_state(str(folder / "state"))
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


def texts(silo, number, labelled=12):
    """Each silo counts in steps of its own, from anywhere."""
    draw = torch.Generator().manual_seed(silo)
    words = (torch.randint(64, (number, 1), generator=draw) + (silo % 10 + 1) * torch.arange(12)) % 64
    without = torch.arange(12) < 12 - labelled
    return [{"input_ids": row, "labels": row.masked_fill(without, -100)} for row in words]


def for_sft(data):
    """The arguments that SFTTrainer takes instead: a Dataset of tokens, and a tokenizer of numbers."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="0", pad_token="0")
    tokens = Dataset.from_list([{"input_ids": text["input_ids"].tolist()} for text in data])
    return {"train_dataset": tokens, "processing_class": tokenizer}


def digest(tensors):
    joined = b"".join(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(joined).hexdigest()[:16]


def main():
    folder, given = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")
    chosen = {name: given.pop(name, value) for name, value in OURS.items()}
    fixed = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4}
    given |= {"learning_rate": chosen["rates"][RANK]} if chosen["rates"] else {}
    args = transformers.TrainingArguments(str(folder), **{**fixed, **DEFAULTS, **given})
    trainer_class = transformers.Trainer
    if chosen["sft"]:
        import trl

        trainer_class, args = trl.SFTTrainer, trl.SFTConfig(str(folder), **{**fixed, **DEFAULTS, **given}, bf16=False)
    model = make_model(chosen)
    base = [p for p in model.parameters() if not p.requires_grad]
    before, size = digest(base), sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    common = {
        "train_dataset": texts(RANK, chosen["numbers"][RANK], chosen["labelled"][RANK]),
        "eval_dataset": texts(RANK + 10, 16) * chosen["evaluates"] or None,
    }
    if chosen["pooled"]:
        common["train_dataset"] = [
            text
            for silo, (number, labelled) in enumerate(zip(chosen["numbers"], chosen["labelled"]))
            for text in texts(silo, number, labelled)
        ]
    if chosen["fails"] == RANK:
        raise RuntimeError("fails by itself")
    federation, others = chosen["federation"], [Killing(chosen["kill"]), Saving(folder, chosen["saves"])]
    if "algorithm" in federation:
        trainer = FederatedTrainer(model, args, federation=federation, callbacks=others, **common)
        callback = trainer.joining
    else:
        callback = FederatedCallback(**federation)
        first = [] if chosen["adds"] or chosen["pooled"] else [callback]
        if chosen["stops_early"]:
            first.insert(0, transformers.EarlyStoppingCallback(1))
            common["compute_metrics"] = lambda _: {"accuracy": float(RANK)}
        if chosen["sft"]:
            common |= for_sft(common["train_dataset"])
        trainer = trainer_class(model, args, callbacks=[*first, *others], **common)
        if chosen["adds"]:
            trainer.add_callback(callback)
    others[1].trainer = trainer
    trainer.train(resume_from_checkpoint=chosen["resume"] or None)
    trainer.save_model(os.path.join(args.output_dir, "final"))
    entries = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    found = {
        "trained": digest(p for p in model.parameters() if p.requires_grad),
        "dtypes": sorted({str(p.dtype) for p in model.parameters() if p.requires_grad}),
        "base_stays": digest(base) == before,
        "trained_bytes": size,
        "accounts": callback.fed and callback.fed.accounts(),
        "output_dir": args.output_dir,
        "max_grad_norm": args.max_grad_norm,
        "loss": entries["loss"],
        "best": [trainer.state.best_metric, trainer.state.best_global_step],
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    }
    (folder / f"found-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
