"""What `pip install t0repro[jax]` promises; tests/test_wheel.py runs it where the rest is absent.

    python jax_only.py CACHE VOCABULARY FOLDER

trains on the cached task from Python, scores, converts by the command line and scores again.
"""

import importlib.util
import os
import subprocess
import sys

import numpy as np

import t0repro

cache, vocabulary, folder = sys.argv[1:]
for absent in ("tensorflow", "seqio", "mesh_tensorflow", "t5", "clu", "promptsource"):
    assert importlib.util.find_spec(absent) is None, absent

from t0repro.runs.train import train  # noqa: E402

model = t0repro.t5_1_1(num_layers=1, d_model=16, d_ff=24, num_heads=2, d_kv=4, vocab_size=1408)
lengths = {"inputs": 64, "targets": 16}
for last_step in (2, 3):  # the second continues where the first stopped
    config = t0repro.training_config(
        f"{folder}/model", model, train_steps=last_step, batch_size=4, sequence_length=lengths
    )
    state = train(config, t0repro.CachedBatches([cache], lengths, batch_size=4, seed=0))
assert int(state.step) == 3

texts, choices = ["is it so ?", "is this the same as that ?"], ["yes", "no"]
scores = t0repro.score(f"{folder}/model", texts, choices, vocabulary=vocabulary)
assert scores.shape == (2, 2) and (scores < 0).all(), scores

command = [sys.executable, "-m", "t0repro.cli"]
environment = {**os.environ, "PYTHONWARNINGS": "error::UserWarning"}
for to in ("mtf", "hf", "t5x"):
    convert = [*command, "convert", f"{folder}/model", f"{folder}/{to}", "--to", to]
    subprocess.run(convert, check=True, env=environment)
    again = t0repro.score(f"{folder}/{to}", texts, choices, vocabulary=vocabulary)
    np.testing.assert_array_equal(again, scores)

# A command that needs the rest says so.
refused = subprocess.run([*command, "tasks", "ls"], capture_output=True, text=True, check=False)
assert refused.returncode == 2 and "bash scripts/setup.sh" in refused.stderr, refused.stderr
print("the JAX-only installation trains, scores and converts")
