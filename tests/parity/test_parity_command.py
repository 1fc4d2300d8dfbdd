"""`t0repro parity`: the stacks agree, and every error that is put into one of them is found."""

import json
from pathlib import Path

import pytest

from t0repro.config.mtf.parser import MeshInputs
from t0repro.errors import UserError
from t0repro.parity import report, run
from t0repro.parity.jax_run import as_stack_result, injected, with_error
from t0repro.parity.mesh_jobs import load_batches, read_result

from ..helpers import commands
from ..helpers.own_lines import foreign_lines

pytestmark = pytest.mark.mtf

GIN_FILES = ["dataset.gin", "demo/t5.1.1.demo.gin", "learning_rate_schedules/constant_0_001.gin"]
GIN_PARAMS = [
    "MIXTURE_NAME = 'demo_train'",
    "num_layers = 1",
    "run.train_steps = 4",
    "run.batch_size = ('tokens_per_batch', 512)",
    "run.sequence_length = {'inputs': 64, 'targets': 16}",
    "serialize_num_microbatches.tokens_per_microbatch_per_replica = 256",
    "mesh_train_dataset_fn.seed = 7",
    "pack_dataset.use_custom_ops = False",
    "utils.run.mesh_shape = []",
    "dropout_rate = 0.0",
]
EVAL_TASK = "demo_synthetic_glue_mrpc_want_to_know_score_eval"
STEPS = 3


def command(out, *more, params=GIN_PARAMS):
    """Runs `t0repro parity` as a program; (exit code, stdout, stderr)."""
    arguments = ["parity", "--module_import", "t0repro.tasks.demo", "--out", str(out), *more]
    arguments += [f"--gin_file={file}" for file in GIN_FILES]
    arguments += [f"--gin_param={param}" for param in params]
    done = commands.run("t0repro", *arguments)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def shifted(tmp_path_factory):
    """The command with an error in the JAX side: its folder, exit code and output."""
    out = tmp_path_factory.mktemp("parity")
    options = ["--inject", "no-shift", "--steps", str(STEPS), "--eval_task", EVAL_TASK]
    return out, *command(out, *options)


@pytest.fixture(scope="module")
def sides(shifted, tmp_path_factory):
    """The same job again, and what Mesh TensorFlow computed for the command."""
    inputs = MeshInputs("", GIN_FILES, GIN_PARAMS, module_imports=["t0repro.tasks.demo"])
    job = run.make_job(inputs, tmp_path_factory.mktemp("again"), steps=STEPS)
    mesh = shifted[0] / run.MESH_FOLDER
    for ours, theirs in zip(job.batches, load_batches(mesh / "batches.npz"), strict=True):
        assert all((ours[name] == theirs[name]).all() for name in theirs)
    return job, as_stack_result(read_result(mesh), [0, 1, STEPS])


def test_a_decoder_that_reads_its_target_is_found_by_the_command(shifted):
    out, code, stdout, stderr = shifted
    assert code == 1 and foreign_lines(stderr) == [], stderr
    assert "first differ at the activation decoder/embedded" in stdout
    found = json.loads((out / "parity.json").read_text())
    assert found["first_departure"] == {"kind": "activation", "name": "decoder/embedded"}
    assert found["injected"] == "no-shift" and not found["passed"]
    kinds = {finding["kind"] for finding in found["findings"]}
    assert kinds >= {"activation", "loss", "gradient", "first step", "last step", "metric"}
    assert len(found["losses"]["jax"]) == STEPS


def test_the_page_shows_both_curves_and_the_errors_and_asks_for_nothing(shifted):
    page = (shifted[0] / "parity.html").read_text()
    # Five plots, each drawn for wide and for narrow screens
    assert page.count("<svg") == 2 * 5 and "decoder/layers_0/mlp" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    text = (shifted[0] / "parity.md").read_text()
    assert "| gradient |" in text and "The error no-shift was put into the JAX side." in text


def test_the_stacks_agree_without_an_error(sides):
    found = run.compare_sides(*sides, start_step=0)
    assert found.passed, report.verdict(found)
    assert report.verdict(found).startswith("The stacks agree: all ")
    assert {f.kind for f in found.findings if f.tolerance is None} == {"last step"}


@pytest.mark.parametrize(
    ("error", "kind", "name"),
    [
        ("slot-swap", "first step", "state/param_states/decoder/layers_0/self_attention/key"),
        ("bucket-eps", "activation", "encoder/layers_0/attention"),
        ("loss-denominator", "loss", "step 1"),
    ],
)
def test_an_injected_error_is_found_where_it_first_shows(sides, error, kind, name):
    found = run.compare_sides(*sides, start_step=0, error=error)
    first = found.departures[0]
    assert not found.passed and first.kind == kind and first.name.startswith(name)


def test_the_model_is_itself_again_after_an_injection(sides):
    from t0repro.model import layers, t5

    before = layers.relative_position_bucket, t5.shift_right
    for error in ("bucket-eps", "no-shift"):
        with injected(error):
            assert (layers.relative_position_bucket, t5.shift_right) != before
        assert (layers.relative_position_bucket, t5.shift_right) == before


def test_a_run_of_caches_that_are_not_found_is_refused_with_the_binding_for_rows(tmp_path):
    params = [*GIN_PARAMS, "mesh_train_dataset_fn.use_cached = True"]
    inputs = MeshInputs("", GIN_FILES, params, module_imports=["t0repro.tasks.demo"])
    with pytest.raises(UserError, match=r"are not cached(?s:.*)use_cached = False") as caught:
        run.make_job(inputs, tmp_path, steps=1)
    assert "cache_dir" not in str(caught.value.fix)


def test_an_error_that_would_change_nothing_is_refused(sides):
    job, reference = sides
    tree = {name: x for name, x in reference.trees[0].items() if not name.endswith("/v_row")}
    with pytest.raises(UserError, match="no square matrix of this model has factored slots"):
        with_error("slot-swap", job.config, job.batches, tree)


def test_dropout_is_refused_with_what_to_bind(tmp_path):
    params = [*GIN_PARAMS[:-1], "dropout_rate = 0.1"]
    inputs = MeshInputs("", GIN_FILES, params, module_imports=["t0repro.tasks.demo"])
    with pytest.raises(UserError, match='--gin_param "dropout_rate = 0.0"'):
        run.make_job(inputs, tmp_path, steps=1)


@pytest.mark.slow
def test_the_command_ends_with_0_from_a_jax_checkpoint(tmp_path):
    first = command(tmp_path / "first", "--steps", "1")
    assert first[0] == 0, first[2]
    mesh = tmp_path / "first" / run.MESH_FOLDER / "model.ckpt-1"
    convert = ["convert", str(mesh), str(tmp_path / "jax"), "--to", "jax"]
    assert commands.run("t0repro", *convert).returncode == 0
    options = ["--from", str(tmp_path / "jax"), "--steps", "20", "--eval_task", EVAL_TASK]
    code, stdout, stderr = command(tmp_path / "second", *options)
    assert code == 0, stdout + stderr
    assert json.loads((tmp_path / "second/parity.json").read_text())["start_step"] == 1


@pytest.mark.slow
def test_bfloat16_is_reported_and_not_judged(tmp_path):
    code, stdout, stderr = command(tmp_path, "--dtype", "bfloat16", "--steps", "2")
    assert code == 0, stderr
    assert "reported, not judged" in stdout
    found = json.loads((Path(tmp_path) / "parity.json").read_text())
    assert {finding["tolerance"] for finding in found["findings"]} == {None}
    by_name = {finding["name"]: finding for finding in found["findings"]}
    # By the RMS: most logits are equal, rounded to eight bits as they are.
    assert 1e-4 < by_name["logits"]["error"] < 1e-1
