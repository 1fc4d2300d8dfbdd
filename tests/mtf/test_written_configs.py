"""The operative_config.gin that t5_mesh_transformer writes runs again on JAX, overridden or not."""

from pathlib import Path

import pytest

from t0repro.config.mtf import dialect
from t0repro.config.mtf.parser import MeshInputs
from t0repro.config.run import TrainRun
from t0repro.errors import UserError

pytestmark = pytest.mark.mtf

TASKS = "t0repro.tasks.demo"
TRAIN = [
    f"--module_import={TASKS}",
    "--gin_file=dataset.gin",
    "--gin_param=MIXTURE_NAME = 'demo_train'",
    "--gin_file=demo/t5.1.1.demo.gin",
    "--gin_param=num_layers = 1",
    "--gin_file=learning_rate_schedules/constant_0_001.gin",
    "--gin_param=run.train_steps = 1",
    "--gin_param=run.batch_size = ('sequences_per_batch', 2)",
    "--gin_param=run.sequence_length = {'inputs': 32, 'targets': 8}",
    "--gin_param=pack_dataset.use_custom_ops = False",
    "--gin_param=utils.run.mesh_shape = []",
]
ENCODER_DECODER = {
    "loss_denominator": 64.0,
    "label_smoothing": 0.25,
    "z_loss": 0.5,
    "loss_fn": None,
    "shared_embedding_and_softmax_weights": True,
    "loss_on_targets_only": False,
}


def test_a_file_that_mesh_tensorflow_wrote_runs_on_jax_whatever_the_decoders_options(
    server, tmp_path
):
    params = [f"decoder/Unitransformer.{name} = {it}" for name, it in ENCODER_DECODER.items()]
    written = trained(server, tmp_path, *params)
    for name in ENCODER_DECODER:
        for tower in ("encoder", "decoder"):  # gin's own way: both, whichever was bound
            assert f"\n{tower}/Unitransformer.{name} = " in written.read_text()
    model = loaded(written).model
    assert (model.loss_denominator, model.label_smoothing, model.z_loss) == (64.0, 0.25, 0.5)
    assert model.logits_from_embedding
    # Each can be overridden for the decoder, which no longer agrees with the encoder then.
    for name, value in {**ENCODER_DECODER, "z_loss": 0.125, "label_smoothing": 0.0}.items():
        model = loaded(written, f"decoder/Unitransformer.{name} = {value}").model
        assert name not in ("z_loss", "label_smoothing") or getattr(model, name) == value
    # Where it has no effect, the remedy has.
    with pytest.raises(UserError, match="decoder/Unitransformer.z_loss is bound too") as error:
        loaded(written, "Unitransformer.z_loss = 0.125")
    assert error.value.fix and "Bind decoder/Unitransformer.z_loss" in error.value.fix
    with pytest.raises(UserError, match="encoder/Unitransformer.z_loss has no effect"):
        loaded(written, "encoder/Unitransformer.z_loss = 0.125")


def test_a_language_models_file_runs_on_jax_too(server, tmp_path):
    written = trained(
        server, tmp_path, "run.model_type = 'delimited_lm'",
        "Unitransformer.loss_on_targets_only = True", "Unitransformer.z_loss = 0.5",
    )  # fmt: skip
    model = loaded(written, "Unitransformer.z_loss = 0.125").model
    assert model.loss_on_targets_only and model.z_loss == 0.125


def trained(server, model_dir: Path, *params: str) -> Path:
    """The file that a step on Mesh TensorFlow leaves."""
    more = [f"--gin_param={each}" for each in params]
    code, stderr = server.run([f"--model_dir={model_dir}", *TRAIN, *more])
    assert code == 0, stderr
    return model_dir / "operative_config.gin"


def loaded(written: Path, *params: str) -> TrainRun:
    """The run that the file describes on JAX."""
    inputs = MeshInputs("again", (str(written),), params, module_imports=(TASKS,))
    return dialect.load(inputs).run
