"""600 hostile bindings through all that a Mesh TensorFlow run's configuration goes through."""

import ast
import contextlib
import io
import random
from pathlib import Path

import pytest

from t0repro.config import table
from t0repro.config.mtf import dialect, stand_ins
from t0repro.config.mtf.parser import MeshInputs
from t0repro.config.mtf.refusals import known_bindings
from t0repro.config.run import Run
from t0repro.errors import UserError

from .mutations import mutated_binding
from .test_mtf_gin import FILES, PARAMS

pytestmark = pytest.mark.mtf

# Of configurables that the run does not call, as another optimizer: they are not read at all.
NOT_CALLED = (
    "AdamWeightDecay", "Momentum", "Sgd", "learning_rate_schedules", "product_learning",
    "save_scores", "score_", "infer_model", "decode_from_file", "tpu_mesh_shape",
    "auto_train_steps", "utils.decode", "clean_decodes", "mesh_eval_dataset_fn", "jax_model",
)  # fmt: skip
# Read, but nothing on the JAX stack depends on them: what its caller passes in any case, and what
# says how TensorFlow and a TPU's host are to work.
INERT = (
    "sample_autoregressive.", "beam_search.", "run.gcp_project", "run.tpu",
    "run.iterations_per_loop",
    "run.export_", "run.vocabulary", "run.autostack", "run.mesh_devices", "run.model_dir",
    "Unitransformer.max_length",  # of position embeddings, which are refused
    "rewrite_stack_variables.", "serialize_num_microbatches.", "tpu_estimator_model_fn.",
    "get_variable_dtype.slice", "get_variable_dtype.activation",  # float32 without --tpu
    "AdafactorOptimizer.learning_rate", "AdafactorOptimizer.stacked_dim_names",
    "Bitransformer.decode.variable_dtype", "run.layout_rules",  # of a mesh of one device
    "run.mesh_shape", "get_vocabulary.",
)  # fmt: skip


def arguments() -> dict:
    """Every argument that a training of the demo may bind, by its full name, with its default."""
    return {
        f"{selector}.{name}": parameter.default
        for selector in known_bindings()
        if not any(part in selector for part in NOT_CALLED)
        for name, parameter in stand_ins.signature_of(selector).parameters.items()
        if name != "self"
    }


def says_nothing_new(line: str) -> bool:
    """Whether a binding is inert, or binds an argument to its default."""
    name, _, value = line.partition(" = ")
    selector, _, argument = name.rpartition("/")[2].rpartition(".")
    default = stand_ins.signature_of(selector).parameters[argument].default
    with contextlib.suppress(ValueError, SyntaxError):
        if ast.literal_eval(value) == default:
            return True
    return any(part in name for part in INERT)


def load(folder: Path, lines: list[str], param: str | None = None) -> tuple[Run, str]:
    """The run with these lines in a file, and what was warned of."""
    file = folder / "mine.gin"
    file.write_text("\n".join([*lines]))
    params = [] if param is None else [param]
    inputs = MeshInputs(
        "a_model_dir", (*FILES, str(file)), params, module_imports=("t0repro.tasks.demo",)
    )
    with contextlib.redirect_stderr(io.StringIO()) as warned:
        config = dialect.load(inputs).run
    table.render(config)
    assert type(config).from_json(config.to_json()) == config
    return config, warned.getvalue()


def changes_another_mode(folder: Path, base: list[str], line: str) -> bool:
    """Whether a binding that a training does not read changes the run of another mode."""
    for mode in ("eval", "perplexity_eval", "infer"):
        bound = [*base, f"utils.run.mode = '{mode}'"]
        if load(folder, [*bound, line])[0] != load(folder, bound)[0]:
            return True
    return False


def test_600_hostile_bindings_change_the_run_or_are_refused_with_their_place(tmp_path):
    base = [*PARAMS, "# Mine."]
    plain = load(tmp_path, base)[0]
    seed, known = random.Random(31), arguments()
    faults, outcomes = [], dict.fromkeys(("changed", "refused", "inert"), 0)
    for number in range(600):
        line = mutated_binding(seed, known)
        # Half of them stand in a file, whose line has to be named.
        lines, param = ([*base, line], None) if number % 2 else (base, line)
        place = line if param else f"{tmp_path / 'mine.gin'}:{len(base) + 1}"
        try:
            config, warned = load(tmp_path, lines, param)
        except UserError as error:
            outcomes["refused"] += 1
            if not (place in str(error.where) and error.fix and len(str(error)) < 2000):
                faults.append(f"{line}: {error!r}")
        except Exception as error:
            faults.append(f"{line}: {error!r}")
        else:
            changed = config != plain or (
                place not in warned
                and not says_nothing_new(line)
                and changes_another_mode(tmp_path, base, line)
            )
            outcomes["changed" if changed else "inert"] += 1
            if not (changed or place in warned or says_nothing_new(line)):
                faults.append(f"{line}: silent")
    assert not faults, "\n".join(faults)
    # Neither half of the claim is empty.
    assert min(outcomes["changed"], outcomes["refused"]) > 10, outcomes
