"""Writes a tiny decoder-only model with random parameters, in transformers' layout.

    python scripts/demo/decoder_only.py runs/decoder_only

It shows how any model of lm-evaluation-harness gets a report of T0's tasks (docs/any_model.md); its
scores mean nothing. Needs the extras hf and lm-eval.
"""

import shutil
import sys

import torch
import transformers

from t0repro.tasks.vocabulary import default_vocabulary, local_copy


def main(folder: str) -> None:
    """Writes the model and T5's tokenizer to a folder."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32128, n_embd=32, n_layer=2, n_head=2, n_positions=2048, eos_token_id=1
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    shutil.copy(local_copy(default_vocabulary().address), f"{folder}/spiece.model")
    transformers.T5Tokenizer.from_pretrained(folder).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
