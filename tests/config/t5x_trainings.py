"""A training run in T5X's gin files, as several tests configure it."""

from __future__ import annotations

from pathlib import Path

from t0repro.config.run import TrainRun
from t0repro.config.t5x import gin_files, run

MODEL = "t5x/examples/t5/t5_1_1/small.gin"
PRETRAIN, FINETUNE = "t5x/configs/runs/pretrain.gin", "t5x/configs/runs/finetune.gin"
REQUIRED = (
    "DROPOUT_RATE = 0.1",
    "MIXTURE_OR_TASK_NAME = 'a_task'",
    "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 6}",
    "TRAIN_STEPS = 10",
    "MODEL_DIR = 'runs/a'",
)


def config(*bindings: str, files=(MODEL, PRETRAIN)) -> TrainRun:
    """The TrainRun of these files, with these bindings after the required ones."""
    inputs = gin_files.T5xInputs("train", tuple(files), (*REQUIRED, *bindings))
    return run.read_train_run(gin_files.parse(inputs))


# A small model of T5X's decoder-only network and the run that trains it.
DECODER_ONLY = """
from __gin__ import dynamic_registration
import __main__ as train_script
import seqio
from t5x import adafactor
from t5x import models
from t5x.examples.decoder_only import network
VOCABULARY = @seqio.ByteVocabulary()
OPTIMIZER = @adafactor.Adafactor()
MODEL = @models.DecoderOnlyModel()
models.DecoderOnlyModel.module = @network.DecoderWrapper()
models.DecoderOnlyModel.vocabulary = %VOCABULARY
models.DecoderOnlyModel.optimizer_def = %OPTIMIZER
models.DecoderOnlyModel.z_loss = 0.01
network.DecoderWrapper.config = @network.TransformerConfig()
network.TransformerConfig.vocab_size = 384
network.TransformerConfig.emb_dim = 8
network.TransformerConfig.num_heads = 2
network.TransformerConfig.num_layers = 2
network.TransformerConfig.head_dim = 4
network.TransformerConfig.mlp_dim = 12
network.TransformerConfig.mlp_activations = ('gelu', 'linear')
network.TransformerConfig.dropout_rate = %DROPOUT_RATE
network.TransformerConfig.logits_via_embedding = True
include 't5x/configs/runs/pretrain.gin'
train_script.train.infer_eval_dataset_cfg = None
BATCH_SIZE = 4
"""
BIDIRECTIONAL = "models.DecoderOnlyModel.inputs_bidirectional_attention = True"
PASSED_THROUGH = (
    "models.DecoderOnlyModel.feature_converter_cls = @seqio.PassThroughFeatureConverter"
)


def decoder_only_config(folder: Path, *lines: str) -> TrainRun:
    """The TrainRun of the decoder-only model; its file, with further lines, is in the folder."""
    (folder / "decoder_only.gin").write_text("\n".join([DECODER_ONLY, *lines]))
    return config(files=[str(folder / "decoder_only.gin")])
