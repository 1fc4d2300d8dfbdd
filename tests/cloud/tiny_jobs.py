"""Gin files of jobs on a tiny model and a task of the demo, which a CPU runs in seconds."""

from pathlib import Path

from tests.runs.tiny_gin import MODEL, SIZES

TASK = "demo_synthetic_glue_mrpc_want_to_know_score_eval"
_TRAIN = """
import __main__ as train_script
train/utils.DatasetConfig.split = 'validation'
USE_CACHED_TASKS = False
BATCH_SIZE = 8
RANDOM_SEED = 42
train_script.train.train_eval_dataset_cfg = None
train_script.train.eval_period = 2
utils.SaveCheckpointConfig.period = 2
train_script.train.infer_eval_dataset_cfg = @infer_eval/utils.DatasetConfig()
train_script.train.inference_evaluator_cls = @seqio.Evaluator
infer_eval/utils.DatasetConfig:
  mixture_or_task_name = %MIXTURE_OR_TASK_NAME
  task_feature_lengths = %TASK_FEATURE_LENGTHS
  split = 'validation'
  batch_size = %BATCH_SIZE
  shuffle = False
  seed = 42
  use_cached = False
  pack = False
seqio.Evaluator:
  logger_cls = [@seqio.TensorBoardLogger]
  num_examples = 4
"""
_EVAL = """
MIXTURE_OR_TASK_SPLIT = 'validation'
seqio.Evaluator.num_examples = 4
"""
_INFER = """
MIXTURE_OR_TASK_SPLIT = 'validation'
"""


def _gin(run_file: str, text: str) -> str:
    return f"""
from __gin__ import dynamic_registration
import seqio
import t0repro.tasks.demo
from t5x import utils
from t5x.examples.t5 import network
include '{MODEL}'
include 't5x/configs/runs/{run_file}.gin'
include 'shared/sizes.gin'
MIXTURE_OR_TASK_NAME = '{TASK}'
TASK_FEATURE_LENGTHS = {{'inputs': 64, 'targets': 16}}
DROPOUT_RATE = 0.0
{text}"""


def write(folder: Path) -> None:
    """Writes a gin file for each run mode, and the file that they include."""
    (folder / "shared").mkdir(parents=True)
    (folder / "train.gin").write_text(_gin("pretrain", _TRAIN))
    (folder / "precompile.gin").write_text(_gin("precompile", "BATCH_SIZE = 8\n"))
    (folder / "eval.gin").write_text(_gin("eval", _EVAL))
    (folder / "infer.gin").write_text(_gin("infer", _INFER))
    # The evaluation of whichever checkpoint an auxiliary job is given.
    checkpoint = "CHECKPOINT_PATH = %INITIAL_CHECKPOINT_PATH\n"
    (folder / "aux.gin").write_text(_gin("eval", _EVAL) + checkpoint)
    imports = "from __gin__ import dynamic_registration\nimport seqio\n"
    imports += "from t5x.examples.t5 import network\n"
    (folder / "shared/sizes.gin").write_text(imports + "\n".join(SIZES) + "\n")
