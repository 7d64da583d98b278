"""Joules in the log of Hugging Face's Trainer: every line has the joules of the interval before it.

    pip install '.[models]' accelerate   # in the clone
    python examples/huggingface_trainer.py

A small GPT-2 with random weights learns to count. Nothing is downloaded. Callbacks that report elsewhere come first in
the Trainer's list; `attach` puts ours before them, so that they pass the joules on too.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tessera.integrations.huggingface import EnergyCallback

WORDS, LENGTH = 64, 32


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    """Numbers that go up by one, from a random start."""
    starts = torch.randint(0, WORDS, (count,), generator=torch.Generator().manual_seed(0))
    rows = [(start + torch.arange(LENGTH)) % WORDS for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(steps: int, folder: str) -> tuple[Any, EnergyCallback]:
    """Train; return the Trainer and the callback, whose `report` is the whole training."""
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=16, logging_steps=max(steps // 4, 1),
        learning_rate=1e-3, report_to=[], save_strategy="no", disable_tqdm=True, include_num_input_tokens_seen="all",
    )  # fmt: skip
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=sequences(16 * steps))
    callback = EnergyCallback().attach(trainer)
    trainer.train()
    return trainer, callback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer, callback = train(args.steps, folder)
    for line in trainer.state.log_history:
        if "j_per_token" in line:
            print(f"step {line['step']}: loss {line['loss']:.3f}, {1e3 * line['j_per_token']:.3f} mJ per token")
    report = callback.report
    assert report is not None
    print(f"in total {report.total.energy_j:.2f} ± {report.total.error_j:.2f} J, {report.basis}")
    for unit, joules, error in report.per_work():
        print(f"  {1e3 * joules:.4g} ± {1e3 * error:.2g} mJ per {unit}")


if __name__ == "__main__":
    main()
