"""Hugging Face's Trainer: record a training with one callback.

python examples/huggingface_trainer.py [OUT]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fp8dbg
from fp8dbg.hooks import huggingface


def main() -> None:
    """Train a two-layer Llama on random tokens, recording what FP8 would have done to every linear layer."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "hf_run")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    tokens = torch.randint(256, (64, 33))
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=str(out / "trainer"),
            max_steps=12,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[huggingface.callback(out / "run", every=4)],  # the one line
    )
    trainer.train()
    run = fp8dbg.open_run(out / "run")
    layers = run.sql("select count(distinct layer) from tensors").fetchall()
    print(f"{layers[0][0]} layers recorded; next: fp8dbg report {out / 'run'}")


if __name__ == "__main__":
    main()
