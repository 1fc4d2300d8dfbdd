"""The code of docs/trainer.md and of its examples runs as it is, and learns."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from t0repro.cli.bodies.training import start
from t0repro.config.run import UserClass
from t0repro.config.t5x import gin_files
from t0repro.config.t5x.model import read_vocabularies
from t0repro.config.t5x.run import read_eval_run, read_train_run
from t0repro.errors import UserError
from t0repro.evaluation.model_functions import make_functions
from t0repro.model.t5 import T5
from t0repro.runs.restored_checkpoints import make_generating_model
from t0repro.training.checkpoints import load_tree, save_checkpoint
from t0repro.training.train_state import from_flat_tree

from ..helpers import tiny_models as tiny
from ..runs.tiny_gin import SIZES

EVALUATED = "demo_synthetic_glue_mrpc_want_to_know"
DOCS = Path(__file__).resolve().parents[2] / "docs/trainer.md"


def test_the_example_of_distillation_trains_a_student(tmp_path):
    namespace = runpy.run_path(str(DOCS.parents[1] / "scripts/demo/distill.py"))
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


def test_the_t5_made_by_hand_learns_to_copy_and_generates():
    code, *_ = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    namespace = {"__name__": "the_docs"}
    exec(compile(code, str(DOCS), "exec"), namespace)
    losses, network = namespace["losses"], namespace["network"]
    assert isinstance(network, T5) and losses[-1] < losses[0]
    # The plain sum over 8 rows of 16 targets, near log(384) each at first.
    assert 0.5 < losses[0] / (8 * 16 * np.log(384)) < 2
    assert namespace["generated"].shape == (8, 16)


@pytest.fixture
def extension(tmp_path, monkeypatch):
    """The ported extension's gin file, beside its module, and the bindings of a tiny model."""
    example = DOCS.parents[1] / "scripts/demo/t5x_extension"
    gin = (example / "my_run.gin").read_text()
    shutil.copy(example / "my_extension.py", tmp_path)
    (tmp_path / "my_run.gin").write_text("\n".join([gin, "import seqio", *SIZES, ""]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_extension", raising=False)

    def parsed(*lines):
        with open(tmp_path / "my_run.gin", "a") as file:
            file.write("\n".join([f"MODEL_DIR = '{tmp_path}/run'", *lines, ""]))
        return gin_files.parse(gin_files.T5xInputs("train", (str(tmp_path / "my_run.gin"),)))

    return parsed


def test_a_ported_t5x_extension_trains_from_its_gin_file(extension, tmp_path, monkeypatch, capsys):
    """Its model, trainer, metric and action take part, and its predict_batch in evaluations."""
    parsed = extension(
        "train_script.train.eval_period = 2",
        "train_script.train.infer_eval_dataset_cfg = @infer_eval/utils.DatasetConfig()",
        "train_script.train.inference_evaluator_cls = @seqio.Evaluator",
        f"infer_eval/utils.DatasetConfig.mixture_or_task_name = '{EVALUATED}'",
        "infer_eval/utils.DatasetConfig.split = 'validation'",
        "infer_eval/utils.DatasetConfig.task_feature_lengths = %TASK_FEATURE_LENGTHS",
        "infer_eval/utils.DatasetConfig.batch_size = 8",
        "infer_eval/utils.DatasetConfig.shuffle = False",
        "infer_eval/utils.DatasetConfig.seed = 1",
        "seqio.Evaluator.num_examples = 8",
    )
    for module in parsed.imports:
        __import__(module)
    import my_extension

    generated, own = [], my_extension.RobustModel.predict_batch
    monkeypatch.setattr(
        my_extension.RobustModel,
        "predict_batch",
        lambda self, *args: generated.append(own(self, *args)) or generated[-1],
    )
    start(
        parsed.gin_text,
        read_train_run(parsed),
        read_vocabularies(parsed.program["model"], {}),
        False,
    )
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["split"] == "train" and "loss" in row]
    assert [row["step"] for row in trained] == [2]
    assert trained[0]["lowest_log_prob"] < 0 and trained[0]["updates_left_out"] == 0
    assert 0 < trained[0]["loss"] < 8 * 16 / 0.7 / 1024
    assert [x.shape for x in generated] == [(8, 16)]
    assert any(row["split"] == f"inference_eval/{EVALUATED}" for row in rows)
    assert "an action on the training run's metrics" in capsys.readouterr().err


def test_what_cannot_be_used_is_refused_with_its_line(extension, tmp_path):
    with open(tmp_path / "my_extension.py", "a") as file:
        file.write("\n\nclass Nothing:\n    pass\n")
    for line, message in (
        ("trainer_cls = @my_extension.Nothing", "trainer_cls is @my_extension.Nothing"),
        (
            "actions = {'TRAIN': [@my_extension.Nothing()]}",
            "my_extension.Nothing, which is not an ac",
        ),
    ):
        with pytest.raises(UserError, match=message) as raised:
            read_train_run(extension(f"train_script.train.{line}"))
        assert "my_run.gin:" in str(raised.value)
        lines = (tmp_path / "my_run.gin").read_text().splitlines()
        (tmp_path / "my_run.gin").write_text("\n".join([*lines[:-1], ""]))


def test_eval_generates_by_the_users_model(extension, tmp_path):
    extension()
    lines = (tmp_path / "my_run.gin").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("RANDOM_SEED", "BATCH_SIZE", "TRAIN_S"))]
    text = "\n".join(kept).replace("runs/pretrain.gin", "runs/eval.gin")
    text = text[: text.index("train_script.train:")] + "\n".join(["import seqio", *SIZES, ""])
    values = {"CHECKPOINT_PATH": "x", "EVAL_OUTPUT_DIR": "y", "MIXTURE_OR_TASK_NAME": EVALUATED}
    text += "\n".join(f"{name} = '{value}'" for name, value in values.items()) + "\n"
    text = text.replace("import __main__ as train_script", "import __main__ as eval_script")
    (tmp_path / "my_eval.gin").write_text(text)
    plan = read_eval_run(
        gin_files.parse(gin_files.T5xInputs("eval", (str(tmp_path / "my_eval.gin"),)))
    )
    assert plan.user_model == UserClass("my_extension", "RobustModel", {"q": 0.7})
    assert "user_model" in plan.decisive()
    model = make_generating_model(plan, T5(plan.model, plan.dtypes))
    functions = make_functions(model, tiny.new_state().params, plan.decoding, plan.data)
    assert type(functions).__name__ == "UserModelFunctions" and model._q == 0.7
