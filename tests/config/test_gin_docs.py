"""docs/gin.md: its tables have every binding of the T0 commands, and say of each what is so."""

import re
from pathlib import Path

import pytest

from t0repro.config.mtf import dialect
from t0repro.config.mtf.parser import MeshInputs, parse
from t0repro.config.mtf.refusals import known_bindings

pytestmark = pytest.mark.mtf

ROOT = Path(__file__).parents[2]
FILES = (
    "dataset.gin",
    "models/t5.1.1.xxl.gin",
    "learning_rate_schedules/constant_0_001.gin",
    "score_eval.gin",
)
# What the two commands give as --gin_param.
PARAMS = (
    "MIXTURE_NAME = 'demo_train'",
    "utils.run.init_checkpoint = 'model.ckpt-1100000'",
    "run.train_steps = 1112200",
    "run.batch_size = ('tokens_per_batch', 1048576)",
    "run.sequence_length = {'inputs': 1024, 'targets': 256}",
    "run.save_checkpoints_steps = 1000",
    "run.dataset_split = 'validation'",
    "utils.tpu_mesh_shape.model_parallelism = 8",
    "utils.tpu_mesh_shape.tpu_topology = 'v3-512'",
    "mesh_train_dataset_fn.use_cached = True",
    "mesh_train_dataset_fn.seed = 1",
    "mesh_eval_dataset_fn.use_cached = True",
    "mesh_eval_dataset_fn.num_eval_examples = -1",
    "pack_dataset.use_custom_ops = False",
    "dropout_rate = 0.1",
    "eval_checkpoint_step = 'all'",
)


@pytest.fixture(scope="module")
def rows():
    """What the page says of each binding; after *JAX:*, how the JAX stack differs."""
    text = (ROOT / "docs" / "gin.md").read_text()
    found = re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, re.MULTILINE)
    assert len(found) == len(dict(found)), "a binding has two rows"
    return dict(found)


@pytest.fixture(scope="module")
def bindings():
    """Scope, selector and argument of everything that the commands' files and overrides bind."""
    inputs = MeshInputs("a_model_dir", FILES, PARAMS, module_imports=("t0repro.tasks.demo",))
    return list(parse(inputs).places)


def written(scope: str, selector: str, argument: str) -> str:
    """A binding as the table writes it."""
    if selector == "gin.macro":
        return scope
    short = selector if selector.startswith("Bitransformer.") else selector.rpartition(".")[2]
    return f"{scope}/{short}.{argument}" if scope else f"{short}.{argument}"


def test_every_binding_of_the_t0_commands_and_of_defaults_gin_is_in_the_table(rows, bindings):
    assert len(bindings) > 60
    missing = [written(*binding) for binding in bindings if written(*binding) not in rows]
    assert missing == []


def test_macros_that_t0s_own_commands_set_are_in_the_table(rows):
    assert {"MIXTURE_NAME", "tokens_per_batch", "model_info", "eval_checkpoint_step"} <= set(rows)


def test_overrides_of_the_scripts_are_in_the_table(rows):
    for script in ("train.sh", "rank_eval.sh"):
        text = (ROOT / "scripts" / script).read_text()
        for name in re.findall(r'--gin_param="([\w./]+) = ', text):
            assert name.removeprefix("utils.") in rows, (script, name)


def test_what_the_table_calls_the_same_is_known_to_the_reader(rows):
    checked = 0
    for name, says in rows.items():
        if "*JAX:*" in says or "." not in name or name.startswith("t0repro."):
            continue
        selector, _, argument = name.rpartition("/")[2].rpartition(".")
        matches = [known for known in known_bindings() if f".{known}".endswith(f".{selector}")]
        assert matches, f"{name} is not a configurable that the reader knows"
        for known in matches:
            arguments = known_bindings()[known]
            if argument == "use_custom_ops":
                continue  # known by its default alone
            assert arguments is ... or argument in arguments, name
        checked += 1
    assert checked > 90


def test_what_the_table_calls_without_effect_is_no_error(rows, bindings):
    """The T0 commands load as they are; so the bindings without effect in them are passed over."""
    assert any("*JAX:* no effect" in says for says in rows.values())
    inputs = MeshInputs(
        "a_model_dir",
        FILES[:3],
        [param for param in PARAMS if not param.startswith(("run.dataset_split", "eval_"))],
        module_imports=("t0repro.tasks.demo",),
    )
    config = dialect.load(inputs).run
    assert config.batch_size == 1024
    # 512 cores, 8 to a model: 64 replicas of 16 sequences, one sequence a microbatch.
    assert config.num_microbatches == 16
    assert config.model.d_model == 4096 and config.model.dropout_rate == 0.1
