"""The PyTorch side of train.py: transformers' T5 on the same batches, in its own process.

    python scripts/bench/train_torch.py RUN.json BATCHES.npz pytorch|compiled STEPS

Each row counts as one example, because transformers has no segments; the matmuls are the same. Uses
a GPU if there is one, the run's microbatches, bfloat16 by autocast, and full rematerialization of
each layer if the run rematerializes anything. An adapter's LoRA is PEFT's, and its
frozen base has the adapter's base_dtype.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time

_STARTED = time.perf_counter()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import T5Config, T5ForConditionalGeneration  # noqa: E402


def main() -> None:
    """Trains a few steps and prints the figures as JSON."""
    run, batches, way, steps = sys.argv[1:]
    with open(run) as file:
        values = json.load(file)
    size, parts = values["model"], values["num_microbatches"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = values["dtypes"]["activation"] == "bfloat16"
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=size["vocab_size"],
            num_layers=size["num_encoder_layers"],
            num_decoder_layers=size["num_decoder_layers"],
            d_model=size["d_model"],
            d_ff=size["d_ff"],
            num_heads=size["num_heads"],
            d_kv=size["d_kv"],
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            decoder_start_token_id=0,
            dropout_rate=size["dropout_rate"],
        )
    ).to(device)
    if size["recompute"] not in (None, "none"):
        model.gradient_checkpointing_enable()
    if adapter := size["adapter"]:
        import peft

        config = peft.LoraConfig(
            r=adapter["rank"], lora_alpha=adapter["alpha"], target_modules=["q", "v"]
        )
        model = peft.get_peft_model(model.to(getattr(torch, adapter["base_dtype"])), config)
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.Adafactor(trained, lr=1e-3)
    forward = torch.compile(model) if way == "compiled" else model
    arrays = {name: torch.from_numpy(x).long().to(device) for name, x in np.load(batches).items()}
    count, seconds, first = len(arrays["targets"]), [], 0.0
    for number in range(int(steps) + 1):
        before = time.perf_counter()
        features = (arrays[name][number % count].chunk(parts) for name in ("inputs", "targets"))
        for inputs, targets in zip(*features, strict=True):
            labels = targets.masked_fill(targets == 0, -100)
            with torch.autocast(device, torch.bfloat16, enabled=half):
                mask = (inputs != 0).long()
                loss = forward(input_ids=inputs, attention_mask=mask, labels=labels).loss
            (loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - before)
        first = first or time.perf_counter() - _STARTED
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device == "cuda":
        memory = torch.cuda.max_memory_allocated()
    step = statistics.median(seconds[1:])
    print(json.dumps({"first_step": first, "step": step, "memory": memory}))


if __name__ == "__main__":
    main()
