"""t5_mesh_transformer --backend=jax: the files of a run, and what it refuses."""

import json
import shutil
from pathlib import Path

import mesh_commands as commands
import numpy as np
import pytest
from safetensors.numpy import save_file
from sentencepiece import SentencePieceProcessor

from t0repro.converters.convert import convert
from t0repro.converters.safetensors_files import SafetensorsFile
from t0repro.errors import UserError
from t0repro.evaluation.outputs import find_tasks, read_task_scores
from t0repro.reports.make_report import ReportOptions, make_report
from t0repro.reports.run import Run
from t0repro.reports.statistics import Bootstrap

from ..converters.tensorflow_tables import compress_index
from ..helpers.own_lines import foreign_lines

pytestmark = pytest.mark.mtf

JAX = "--backend=jax"
QUICK = ReportOptions(bootstrap=Bootstrap(100))


def rows(model_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(server, tmp_path_factory) -> Path:
    """A model_dir that JAX trained for four steps and evaluated at both of its checkpoints."""
    model_dir = tmp_path_factory.mktemp("jax") / "model"
    code, text = server.run([f"--model_dir={model_dir}", *commands.TRAIN, JAX])
    assert code == 0 and foreign_lines(text) == [], text
    scores = model_dir / "scored"
    evaluate = commands.evaluate(model_dir, "score_eval", "tiny_eval", JAX)
    code, text = server.run(
        [
            *evaluate,
            "--gin_param=run.eval_checkpoint_step = 'all'",
            f"--gin_param=save_scores.scores_filename = '{scores}'",
        ]
    )
    assert code == 0 and foreign_lines(text) == [], text
    return model_dir


def test_training_leaves_checkpoints_commands_metrics_and_events(run):
    assert {path.name for path in run.glob("checkpoint_*")} == {"checkpoint_2", "checkpoint_4"}
    trained = [row for row in rows(run) if row["split"] == "train"]
    assert [row["step"] for row in trained] == [1, 2, 3, 4]
    assert all(row["loss"] > 0 and row["learning_rate"] > 0 for row in trained)
    assert "--backend=jax" in (run / "commands" / "command").read_text()
    assert list(run.glob("events.out.tfevents.*"))


def test_evaluation_leaves_mesh_tensorflows_files_and_a_metrics_line_for_each_task(run):
    folder = run / "validation_eval"
    tasks = find_tasks(folder)
    assert tasks and all(steps == [2, 4] for steps in tasks.values())
    for scores in read_task_scores(folder, 4):
        assert scores.is_correct.any() and (scores.score < 0).all()
    judged = [row for row in rows(run) if row["split"] == "validation"]
    assert {(row["task"], row["step"]) for row in judged} == {
        (task, step) for task in tasks for step in (2, 4)
    }
    assert all("accuracy" in row for row in judged)


def test_a_report_finds_what_the_evaluation_recorded(run):
    report = make_report(Run("jax", run / "validation_eval"), {}, QUICK)
    provenance = report.provenance
    assert provenance.step == 4 and provenance.duration_seconds > 0
    assert provenance.checkpoint == str(run / "checkpoint_4")
    assert all((provenance.checkpoint_hash, provenance.templates_hash, provenance.data_revision)), (
        "not recorded"
    )
    assert "CPU cores" in provenance.device
    (cost,) = report.tasks
    assert (cost.inputs, cost.available, cost.cut_inputs, cost.cut_targets) == (5, 5, 0, 0)


def test_the_command_ends_with_accuracies_files_and_the_command_for_a_report(
    trained, server, vocabulary, tmp_path
):
    found = []
    encode = SentencePieceProcessor(str(vocabulary)).encode
    choice_tokens = [len(encode(color)) + 1 for color in ("red", "green", "blue", "white")]
    for backend in ("jax", "mtf"):
        model_dir = shutil.copytree(trained[0], tmp_path / backend)
        flags = commands.evaluate(model_dir, "score_eval", "tiny_eval", f"--backend={backend}")
        code, text = server.run(flags)
        assert code == 0, text
        (line,) = [row for row in rows(model_dir) if row["split"] == "validation"]
        assert f"{line['task']}  accuracy {line['accuracy']:.2f}" in text, backend
        folder = model_dir / "validation_eval"
        assert f"wrote 3 files into {folder}" in text, backend
        assert f"t0repro report make {folder} --out {model_dir / 'report'}" in text, backend
        report = make_report(Run(backend, folder), {}, QUICK)
        (cost,) = report.tasks
        assert (cost.inputs, cost.available, cost.cut_inputs, cost.cut_targets) == (5, 5, 0, 0)
        found.append(report.provenance)
        # Tokens of the choices, EOS included, not the sequence length of 8 that they are padded to.
        (scores,) = read_task_scores(folder)
        assert scores.target_length.tolist() == [choice_tokens[n] for n in scores.choice_index]
    # The same tensors, read on both stacks.
    assert found[0].checkpoint_hash == found[1].checkpoint_hash
    assert [Path(each.checkpoint).name for each in found] == ["model.ckpt-4"] * 2
    for each in found:
        assert all((each.checkpoint_hash, each.templates_hash, each.data_revision)), each
        assert "CPU cores" in each.device and each.duration_seconds > 0


@pytest.mark.parametrize("backend", ["jax", "mtf"])
def test_files_that_were_damaged_are_not_believed_and_written_again(
    trained, server, tmp_path, backend
):
    model_dir = shutil.copytree(trained[0], tmp_path / "model")
    folder = model_dir / "validation_eval"
    flags = commands.evaluate(model_dir, "score_eval", "tiny_eval", f"--backend={backend}")
    cut = [*flags, "--gin_param=mesh_eval_dataset_fn.num_eval_examples = 6"]
    code, text = server.run(cut)
    assert code == 2 and "Traceback" not in text, text
    assert "6 pairs cannot be ranked: each input has 4 choices" in text
    assert not [*folder.glob("results/*")]
    assert server.run(flags)[0] == 0
    paths = [path for path in sorted(folder.rglob("*")) if "tiny_generate" in path.name]
    assert len(paths) == 4  # inputs, targets, predictions, record
    whole = {path: path.read_bytes() for path in paths}
    for path in paths:
        path.write_bytes(whole[path][:-4])
        with pytest.raises(UserError, match="is not what the evaluation of step 4 wrote"):
            read_task_scores(folder)
        path.write_bytes(whole[path])
    paths[0].write_text("")
    assert server.run(flags)[0] == 0
    read_task_scores(folder)


@pytest.mark.parametrize("backend", ["jax", "mtf"])
def test_cut_inputs_are_recorded_on_both_stacks(trained, server, tmp_path, backend):
    model_dir = shutil.copytree(trained[0], tmp_path / "model")
    flags = commands.evaluate(
        model_dir,
        "score_eval",
        "tiny_eval",
        f"--backend={backend}",
        "--gin_param=run.sequence_length = {'inputs': 3, 'targets': 2}",
    )
    code, text = server.run(flags)
    assert code == 0, text
    (cost,) = make_report(Run(backend, model_dir / "validation_eval"), {}, QUICK).tasks
    assert (cost.inputs, cost.cut_inputs, cost.cut_targets) == (5, 5, 0)


def test_save_scores_writes_a_score_a_target_and_a_length_for_each_pair(run):
    tasks = list(read_task_scores(run / "validation_eval", 4))
    pairs = sum(len(scores.score) for scores in tasks)
    lines = {
        suffix: (run / f"scored.{suffix}").read_text().splitlines()
        for suffix in ("scores", "targets", "lengths")
    }
    assert {suffix: len(found) for suffix, found in lines.items()} == dict.fromkeys(lines, pairs)
    assert all(float(score) < 0 and int(n) > 0 for score, n in zip(*_columns(lines), strict=True))
    in_files = sorted(int(length) for scores in tasks for length in scores.target_length)
    assert in_files == sorted(map(int, lines["lengths"]))


def _columns(lines: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    return lines["scores"], lines["lengths"]


def test_mesh_tensorflow_reads_the_operative_config_that_jax_wrote(run, server, tmp_path):
    flags = [
        f"--model_dir={tmp_path / 'mtf'}",
        "--module_import=tiny_tasks",
        f"--gin_file={run / 'operative_config.gin'}",
        "--gin_param=run.train_steps = 1",
    ]
    code, text = server.run(flags)
    assert code == 0, text
    assert (tmp_path / "mtf" / "model.ckpt-1.index").exists()


def test_a_model_dir_of_mesh_tensorflows_is_evaluated_and_trained_on(trained, server, tmp_path):
    model_dir = shutil.copytree(trained[0], tmp_path / "model")
    code, text = server.run(commands.evaluate(model_dir, "score_eval", "tiny_eval", JAX))
    assert code == 0, text
    assert all(4 in steps for steps in find_tasks(model_dir / "validation_eval").values())
    more = ["--gin_param=run.train_steps = 6"]
    code, text = server.run([f"--model_dir={model_dir}", *commands.TRAIN, *more, JAX])
    assert code == 0, text
    assert (model_dir / "checkpoint_6").is_dir()


def test_both_backends_score_a_checkpoint_with_a_compressed_index_as_without(
    trained, server, tmp_path
):
    plain = shutil.copytree(trained[0], tmp_path / "plain")
    compressed = shutil.copytree(trained[0], tmp_path / "compressed")
    compress_index(compressed / "model.ckpt-4")
    for backend in ("mtf", "jax"):
        scores = []
        for model_dir in (plain, compressed):
            prefix = tmp_path / f"{backend}_{model_dir.name}"
            flags = [
                f"--backend={backend}",
                f"--gin_param=save_scores.scores_filename = '{prefix}'",
            ]
            evaluate = commands.evaluate(model_dir, "score_eval", "tiny_eval", *flags)
            code, text = server.run(evaluate)
            assert code == 0, text
            scores.append(prefix.with_name(prefix.name + ".scores").read_text())
        assert scores[0] == scores[1] != ""


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--gin_param=run.train_stepz = 3"], "doesn't have a parameter named 'train_stepz'"),
        (["--gin_param=DenseReluDense.use_bias = True"], "DenseReluDense.use_bias"),
        (["--gin_param=MIXTURE_NAME = 'tiny_trian'"], "'tiny_train'"),
        (["--gin_param=MIXTURE_NAME = 'tiny_missing_rows'"], "one JSON object per line"),
        (["--gin_param=mesh_train_dataset_fn.use_cached = True"], "seqio_cache_tasks"),
        (["--gin_file=score_eval.gin"], "No checkpoint to evaluate"),
        (["--gin_param=run.init_checkpoint = 'no/model.ckpt-1'"], "no/model.ckpt-1"),
        (["--use_model_api"], "--use_model_api"),
        (["--train_steps=3"], '--gin_param="run.train_steps = ..."'),
    ],
)
def test_bad_input_ends_with_a_message_and_exit_code_2_and_writes_nothing(
    server, tmp_path, flags, part
):
    model_dir = tmp_path / "new"
    code, text = server.run([f"--model_dir={model_dir}", *commands.TRAIN, *flags, JAX])
    assert code == 2, text
    assert part in text and "Traceback" not in text
    assert not model_dir.exists()


@pytest.mark.parametrize("backend", ["jax", "mtf"])
def test_a_misspelt_module_is_refused_before_anything_is_imported(server, tmp_path, backend):
    more = ["--module_import=tiny_taks", f"--backend={backend}"]
    code, text = server.run([f"--model_dir={tmp_path / 'new'}", *commands.TRAIN, *more])
    assert code == 2 and "There is no module 'tiny_taks'." in text, text
    assert "importing" not in text


def test_a_checkpoint_that_lacks_a_shard_or_fits_another_vocabulary_is_refused(
    trained, server, tmp_path
):
    model_dir = shutil.copytree(trained[0], tmp_path / "model")
    other = commands.evaluate(model_dir, "score_eval", "tiny_bytes", JAX)
    code, text = server.run(other)
    assert code == 2 and "--vocab" in text
    (model_dir / "model.ckpt-4.data-00001-of-00002").unlink()
    code, text = server.run(commands.evaluate(model_dir, "score_eval", "tiny_eval", JAX))
    assert code == 2 and "model.ckpt-4.data-00001-of-00002" in text and "Traceback" not in text


@pytest.mark.parametrize("backend", ["jax", "mtf"])
def test_an_address_that_cannot_be_written_to_is_refused_and_becomes_no_local_folder(
    server, backend
):
    bindings = {
        "score_eval": ["run.eval_summary_dir"],
        "infer": ["decode_from_file.output_filename"],
        "score_from_file": ["save_scores.scores_filename"],
    }
    for scheme in ("gs", "s3", "hdfs", "foo"):
        address, stack = f"{scheme}://bucket/run", [*commands.TRAIN, f"--backend={backend}"]
        code, text = server.run([f"--model_dir={address}", *stack])
        # TensorFlow's own gs:// needs credentials, which are looked for before anything else.
        with_gs = backend == "mtf" and scheme == "gs"
        assert code == 2 and ("no Google Cloud credentials" if with_gs else address) in text, text
        for mode, (name,) in bindings.items() if scheme == "s3" else ():
            more = [f"--gin_file={mode}.gin", f"--gin_param={name} = '{address}'"]
            more.append("--gin_param=decode_from_file.input_filename = 'x'")
            code, text = server.run(["--model_dir=new", *stack, *more])
            assert code == 2 and f"{address} cannot be " in text, text
            assert f'where: --gin_param "{name}' in text.replace("'", '"'), text
    assert not [*Path.cwd().glob("*:")] and not Path("new").exists()


def test_a_bfloat16_model_whose_wo_stayed_float32_is_restored(trained, server, tmp_path):
    """As transformers saves a T5 that was loaded in half precision."""
    convert(trained[0], tmp_path / "hf", "hf", slots=False, dtype="bfloat16")
    (tmp_path / "hf" / "conversion.json").unlink()
    weights = SafetensorsFile(str(tmp_path / "hf" / "model.safetensors"))
    arrays = {name: weights.read(name) for name in weights.tensors}
    arrays |= {n: a.astype(np.float32) for n, a in arrays.items() if n.endswith(".wo.weight")}
    save_file(arrays, tmp_path / "hf" / "model.safetensors")
    report = convert(tmp_path / "hf", tmp_path / "model", "mtf")
    assert any("widened to the others' float32" in note for note in report.notes)
    line = commands.evaluate(tmp_path / "model", "score_eval", "tiny_eval")
    line += [
        "--gin_param=utils.get_variable_dtype.master_dtype = 'float32'",
        "--backend=mtf",
    ]
    code, text = server.run(line)
    assert code == 0, text
