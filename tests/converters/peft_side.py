"""Models and adapters for the tests with PEFT, and what PEFT computes with them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.adapters import Adapter
from t0repro.config.model import ModelConfig
from t0repro.converters.adapter_files import AdapterNote
from t0repro.converters.convert import convert
from t0repro.evaluation.opened import open_checkpoint
from t0repro.parameters import naming
from t0repro.training.checkpoints import checkpoint_path, save_tree

from ..helpers import tiny_models as tiny

_DEEP = tiny.model_config(num_encoder_layers=2, num_decoder_layers=2)
_RELU = dataclasses.replace(_DEEP, activations=("relu",))
MODELS = {
    "gated, untied": _DEEP,
    "gated, tied": dataclasses.replace(_DEEP, logits_from_embedding=True),
    "relu, untied": _RELU,
    "relu, tied": dataclasses.replace(_RELU, logits_from_embedding=True),
}

# Two patterns match decoder.block.1.layer.0.SelfAttention.q: PEFT takes the first.
PATTERNS = {
    "rank_pattern": {r"block\.1\..*SelfAttention\.q": 4, "decoder.*q": 1},
    "alpha_pattern": {"EncDecAttention.v": 7, "SelfAttention.q": 5},
}

GOLDENS = {"lora": "gated, untied", "ia3": "relu, tied", "patterns": "gated, untied"}
"""Folders that PEFT wrote, by name, and the models below them: scripts/dev/make_peft_goldens.py."""
GOLDEN_FILES = Path(__file__).parent / "peft_goldens"


def tokens() -> dict[str, np.ndarray]:
    """Two pairs, without padding."""
    generator = np.random.default_rng(1)
    sizes = {"inputs": 7, "targets": 5}
    return {k: generator.integers(2, 128, (2, n)).astype(np.int32) for k, n in sizes.items()}


def _random(shapes: dict[str, tuple[int, ...]], seed: int, size: float) -> dict[str, np.ndarray]:
    """Parameters around zero or, of a vector, around one."""
    generator = np.random.default_rng(seed)
    return {
        f"target/{path}": (size * generator.normal(size=shape) + (len(shape) == 1)).astype("f")
        for path, shape in shapes.items()
    }


def save_base(
    folder: Path, model: ModelConfig, seed: int = 0, slots: bool = False
) -> tuple[Path, Path]:
    """Writes a model as ours and for transformers; the same on every machine."""
    ours, hf = checkpoint_path(folder / "base", 7), folder / "base_hf"
    shapes = model.shape.parameters()
    tree = {**_random(shapes, seed, 0.2), "state/step": np.int32(7)}
    if slots:
        tree |= {
            naming.slot_key(name.removeprefix("target/"), "v"): value**2
            for name, value in _random(shapes, seed + 1, 0.2).items()
        }
    save_tree(ours, tree)
    (folder / "base" / "operative_config.gin").write_text(
        f"DenseReluDense.activation = {list(model.activations)!r}\n"
    )
    convert(ours, hf, "hf")
    return ours, hf


def save_adapter(path: Path, model: ModelConfig, adapter: Adapter, base: Path) -> Path:
    """Writes an adapter far from a new one, as a run of ours does."""
    path = checkpoint_path(path, 4)
    own = _random(adapter.parameter_shapes(model.shape), 2, 0.3)
    save_tree(path, {**own, "state/step": np.int32(4)})
    digest = open_checkpoint(str(base), None, "float32").digest
    AdapterNote(adapter, str(base), digest).write(path)
    return path


Header = dict[str, dict[str, Any]]


def rewrite(folder: Path, change: Callable[[Header, bytearray], None]) -> None:
    """Changes the header and the values of adapter_model.safetensors."""
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header, values = json.loads(content[8:end]), bytearray(content[end:])
    change(header, values)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + values)


def forget_hash(folder: Path) -> None:
    """Leaves of the file's metadata what PEFT writes."""
    rewrite(folder, lambda header, _: header.update(__metadata__={"format": "pt"}))


# ---- PEFT ----------------------------------------------------------------------------------------


def trained(hf: Path, out: Path, config) -> np.ndarray:
    """Trains an adapter with PEFT, saves it, and returns its logits for `tokens`."""
    import peft
    import torch

    torch.manual_seed(0)
    model = peft.get_peft_model(_base(hf), config).train()
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(own, lr=0.03)
    pair = {name: torch.tensor(ids, dtype=torch.long) for name, ids in tokens().items()}
    for _ in range(5):
        optimizer.zero_grad()
        model(input_ids=pair["inputs"], labels=pair["targets"]).loss.backward()
        optimizer.step()
    model.save_pretrained(out)
    return _logits(model)


def logits(hf: Path, adapter: Path | None = None) -> np.ndarray:
    """The logits of a directory's model, with an adapter that PEFT loads onto it or without."""
    import peft

    return _logits(peft.PeftModel.from_pretrained(_base(hf), adapter) if adapter else _base(hf))


def _base(hf: Path):
    import transformers

    return transformers.T5ForConditionalGeneration.from_pretrained(hf)


def _logits(model) -> np.ndarray:
    import torch

    pair = {name: torch.tensor(ids, dtype=torch.long) for name, ids in tokens().items()}
    with torch.no_grad():
        return model.eval()(input_ids=pair["inputs"], labels=pair["targets"]).logits.numpy()
