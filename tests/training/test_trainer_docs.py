"""The custom trainer of docs/trainer.md runs as it is printed there, and learns."""

import re
from pathlib import Path

import jax
import numpy as np

from t0repro.training.checkpoints import load_tree, save_checkpoint
from t0repro.training.train_state import from_flat_tree

from .. import tiny_models as tiny

DOCS = Path(__file__).resolve().parents[2] / "docs/trainer.md"


def test_the_docs_own_code_trains_a_student_in_under_sixty_lines(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    written = [line for line in code.splitlines() if line.strip() and "import" not in line]
    assert len(written) < 60
    namespace = {"__name__": "the_docs"}
    exec(compile(code, str(DOCS), "exec"), namespace)
    module = tiny.model(vocab_size=1408)
    teacher = tiny.new_state(seed=5, vocab_size=1408).params
    state, (first, second) = namespace["imitate"](module, teacher, str(tmp_path), 8)
    assert int(state.step) == 16 and second["gap"] < 0.8 * first["gap"]
    running = float(state.flax_mutables["running"]["gap"])
    assert 0 < running < 2 * first["gap"]
    # A checkpoint has the mutables, and a state is restored with them.
    tree = load_tree(save_checkpoint(tmp_path, state))
    restored = from_flat_tree(tree, jax.eval_shape(lambda: state))
    assert float(restored.flax_mutables["running"]["gap"]) == np.float32(running)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
