"""Fine-tuning on instructions: four silos, each with another task, and one adapter for all. Offline, in a minute:

mpirun -np 4 python instructions.py

Every text is an instruction, six symbols and the answer, one symbol: the first, the last or the largest of the six, or
the one after the first. Each silo knows one of these tasks. A tenth of the answers is wrong, as people are. A tiny
random GPT-2 stands for the pre-trained model. The program prints the loss of the answers of all tasks in new texts: of
the adapter that the silos have trained together, of one that has been trained on the data of all silos in one place
(as many steps, each with the samples of all silos), and of one that rank 0 has trained alone. Settings of the callback
may follow, as JSON: '{"every": 10}'. It needs transformers and peft: pip install 'fedmpi[huggingface]'
"""

import json
import logging
import sys
import warnings

import torch
from mpi4py import MPI
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from fedmpi.huggingface import FederatedCallback

SYMBOLS, ANSWER, TASKS = range(8, 16), 7, ["first", "last", "largest", "next"]


def texts(task, number, seed):
    draw = torch.Generator().manual_seed(100 * seed + task)
    words = torch.randint(SYMBOLS.start, SYMBOLS.stop, (number, 6), generator=draw)
    first, last, largest = words[:, 0], words[:, -1], words.max(1).values
    answers = [first, last, largest, (first + 1 - SYMBOLS.start) % len(SYMBOLS) + SYMBOLS.start][task]
    is_wrong = torch.rand(number, generator=draw) < 0.1
    answers = torch.where(is_wrong, torch.randint(SYMBOLS.start, SYMBOLS.stop, (number,), generator=draw), answers)
    columns = [torch.full((number, 1), task), words, torch.full((number, 1), ANSWER), answers[:, None]]
    rows = torch.cat(columns, 1)
    return [{"input_ids": row, "labels": torch.where(torch.arange(9) < 8, -100, row)} for row in rows]


def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 16, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    base = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
    layers = ["c_attn", "c_proj", "c_fc"]
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=layers, fan_in_fan_out=True))


def tuned(data, batch_size, callbacks=()):
    """The loss of all tasks after the fine-tuning of an adapter."""
    args = TrainingArguments(
        "instructions", max_steps=250, learning_rate=0.015, per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=256, save_strategy="no", logging_strategy="no", use_cpu=True, report_to="none",
        disable_tqdm=True, log_level="error",
    )  # fmt: skip
    trainer = Trainer(model(), args, train_dataset=data, callbacks=list(callbacks))
    trainer.train()
    return trainer.evaluate([text for task in range(len(TASKS)) for text in texts(task, 250, seed=1)])["eval_loss"]


def main():
    warnings.simplefilter("ignore")
    silo = MPI.COMM_WORLD.rank
    own = texts(silo, 2000, seed=0)
    federation = FederatedCallback(**json.loads((*sys.argv, "{}")[1]))
    federated = tuned(own, 16, [federation])
    if silo == 0:  # the others have ended
        pooled = tuned([text for task in range(len(TASKS)) for text in texts(task, 2000, seed=0)], 16 * len(TASKS))
        alone = tuned(own, 16)
        print(f"federated {federated:.3f}, pooled {pooled:.3f}, rank 0 alone {alone:.3f}")
        print(f"{federation.fed.accounts()['bytes'] / 1e6:.1f} MB were sent per silo")


if __name__ == "__main__":
    logging.disable(logging.INFO)
    main()
