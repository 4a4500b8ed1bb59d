"""A small language model that learns to add, with the Trainer of Hugging Face. Nothing is downloaded.

Besides the import, two lines are for spotrun: `spotrun.init()`, before TrainingArguments, and `run.train(trainer)`
instead of `trainer.train()`.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import spotrun

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=float, default=6)
parser.add_argument("--samples", type=int, default=8000)
parser.add_argument("--out", default="model", help="the folder for the model")
options = parser.parse_args()

run = spotrun.init(seed=0)

# Data: lines such as 12+34=046, as lists of numbers.
SIGNS = "0123456789+=\n"


def sums(count: int, seed: int) -> list[dict[str, list[int]]]:
    pairs = torch.randint(0, 100, (count, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    lines = [[SIGNS.index(sign) for sign in f"{a:02}+{b:02}={a + b:03}\n"] for a, b in pairs]
    return [{"input_ids": line, "labels": [-100] * 6 + line[6:]} for line in lines]  # the loss is that of the sum


# Model
torch.manual_seed(0)
size = {"vocab_size": len(SIGNS), "n_positions": 16, "n_embd": 64, "n_layer": 2, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=None))
args = TrainingArguments(
    output_dir="checkpoints",
    num_train_epochs=options.epochs,
    per_device_train_batch_size=32,
    per_device_eval_batch_size=256,
    learning_rate=3e-3,
    logging_steps=20,
    eval_strategy="epoch",
    save_strategy="no",  # spotrun keeps the state
    ddp_find_unused_parameters=False,  # each step uses all of them
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=args, train_dataset=sums(options.samples, 1), eval_dataset=sums(512, 2))
run.train(trainer)
trainer.save_model(options.out)
