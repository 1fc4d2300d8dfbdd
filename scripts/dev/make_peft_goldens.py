"""Makes tests/converters/peft_goldens with the real PEFT (extra hf), for checks without it.

.venv/bin/python -P scripts/dev/make_peft_goldens.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from t0repro.storage import write_atomically

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.converters.peft_side import (  # noqa: E402 - the cases, which are beside their test
    GOLDEN_FILES,
    GOLDENS,
    MODELS,
    PATTERNS,
    save_base,
    trained,
)


def main() -> None:
    """Trains each adapter and keeps its files and its logits."""
    import peft

    configs = {
        "lora": peft.LoraConfig(r=2, lora_alpha=3),
        "ia3": peft.IA3Config(),
        "patterns": peft.LoraConfig(r=2, lora_alpha=3, **PATTERNS),
    }
    for name, model in GOLDENS.items():
        with tempfile.TemporaryDirectory() as folder:
            _, hf = save_base(Path(folder), MODELS[model])
            out = Path(folder) / "peft"
            logits = trained(hf, out, configs[name])
            place = GOLDEN_FILES / name
            config = json.loads((out / "adapter_config.json").read_text())
            # The folder is gone; the test puts in its own.
            config["base_model_name_or_path"] = "base"
            # PEFT writes a set in any order.
            config["target_modules"] = sorted(config["target_modules"])
            weights = (out / "adapter_model.safetensors").read_bytes()
            place.mkdir(parents=True, exist_ok=True)
            write_atomically(place / "adapter_config.json", json.dumps(config, indent=1) + "\n")
            write_atomically(place / "adapter_model.safetensors", weights)
            write_atomically(place / "logits.json", json.dumps(logits.tolist()) + "\n")
            print(place)


if __name__ == "__main__":
    main()
