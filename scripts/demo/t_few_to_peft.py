"""Writes T-Few's pretrained (IA)3 vectors for T0-3B, a pickled file, as a folder of PEFT's.

    python scripts/demo/t_few_to_peft.py t03b_ia3_finish.pt t_few_pretrained runs/t0_3b

Needs the extra `hf`. The file is at https://github.com/r-three/t-few/tree/master/pretrained_checkpoints.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

source, target, base = sys.argv[1:]
vectors = torch.load(source, weights_only=True)
folder = Path(target)
folder.mkdir()
names = {name: f"base_model.model.{name.replace('multi_lora_b', 'ia3_l')}" for name in vectors}
tensors = {names[name]: value for name, value in vectors.items()}
save_file(tensors, folder / "adapter_model.safetensors")
config = {"peft_type": "IA3", "target_modules": ["k", "v", "wi_1"], "feedforward_modules": []}
config["base_model_name_or_path"] = base
(folder / "adapter_config.json").write_text(json.dumps(config))
