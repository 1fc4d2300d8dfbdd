"""T5X's run mode eval: which checkpoints, what the loggers write, what is not done twice."""

import dataclasses
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import seqio

from t0repro.adapters import ia3
from t0repro.config.decoding import DecodingPlan
from t0repro.config.t5x.run import read_eval_run
from t0repro.converters.finding import find_checkpoint
from t0repro.errors import UserError
from t0repro.evaluation.engine import score_examples
from t0repro.evaluation.evaluator import DescribedEvaluator
from t0repro.evaluation.records import read_with_checksum, write_with_checksum
from t0repro.runs.evaluate_checkpoints import EvaluatedCheckpoints, evaluate_checkpoints
from t0repro.runs.restored_checkpoints import choose_checkpoints, identity, open_restored

from ..evaluation.small_model import STEP, save_adapter
from ..helpers.own_lines import foreign_lines
from .tiny_gin import parsed, save_checkpoint

GENERATED = "demo_synthetic_glue_mrpc_want_to_know"
RANKED = f"{GENERATED}_score_eval"


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The demo's tasks, and a mixture of one that generates and one that ranks."""
    import t0repro.tasks.demo  # noqa: F401

    seqio.MixtureRegistry.add("both_kinds", [(GENERATED, 1), (RANKED, 1)])
    yield
    seqio.MixtureRegistry.remove("both_kinds")


def plan(checkpoint, output, *bindings, name="both_kinds"):
    return read_eval_run(
        parsed(
            "eval", "eval", f"MIXTURE_OR_TASK_NAME = '{name}'", f"CHECKPOINT_PATH = '{checkpoint}'",
            f"EVAL_OUTPUT_DIR = '{output}'", "MIXTURE_OR_TASK_SPLIT = 'validation'",
            "seqio.Evaluator.num_examples = 12", "utils.DatasetConfig.batch_size = 8", *bindings,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Checkpoints of steps 3 and 5."""
    folder = tmp_path_factory.mktemp("model")
    for step in (3, 5):
        save_checkpoint(folder, plan("x", "y"), step, seed=step)
    return folder


@pytest.fixture(scope="module")
def evaluated(model_dir, tmp_path_factory):
    """An evaluation of both checkpoints: its plan and results."""
    made = plan(
        model_dir, tmp_path_factory.mktemp("out"), "utils.RestoreCheckpointConfig.mode = 'all'"
    )
    return made, evaluate_checkpoints(made)


def tensorboard(folder):
    """(tag, step) -> value of a task's event files."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found = {}
    for path in folder.glob("events.*"):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found[value.tag, event.step] = float(make_ndarray(value.tensor))
    return found


def test_without_a_task_to_evaluate_there_is_no_length_to_find(tmp_path):
    made = plan("x", tmp_path, name="demo_train")  # whose tasks have no split validation
    data = dataclasses.replace(made.data, sequence_length=None)
    assert DescribedEvaluator(data, made.evaluator, tmp_path, made.decoding).tasks == []


def test_it_says_where_the_loggers_wrote(model_dir, tmp_path, capsys):
    made = plan(model_dir, tmp_path, "seqio.Evaluator.num_examples = 2", name=RANKED)
    evaluate_checkpoints(made)
    assert f"wrote {evaluated_folder(made)}\n" in capsys.readouterr().err
    quiet = "seqio.Evaluator.logger_cls = [@seqio.PyLoggingLogger]"
    evaluate_checkpoints(plan(model_dir, tmp_path, quiet, name=RANKED))
    assert "wrote" not in capsys.readouterr().err


def test_all_checkpoints_are_evaluated_and_loggers_agree(evaluated):
    made, results = evaluated
    assert list(results) == [3, 5] and set(results[3]) == {GENERATED, RANKED}
    folder = evaluated_folder(made)
    for task in (GENERATED, RANKED):
        rows = rows_of(folder / f"{task}-metrics.jsonl")
        assert [row.pop("step") for row in rows] == [3, 5]
        assert rows == [results[3][task], results[5][task]]
        shown = tensorboard(folder / task)
        for step in results:
            for name, value in results[step][task].items():
                np.testing.assert_allclose(shown[f"eval/{name}", step], value, rtol=1e-6)
        predictions = (folder / f"{task}-000003.jsonl").read_text().splitlines()
        assert len(predictions) == 12


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def evaluated_folder(made):
    return Path(made.output_dir) / "inference_eval"


def test_ranked_scores_are_log_likelihoods_of_the_choices(evaluated):
    made, _ = evaluated
    rows = rows_of(evaluated_folder(made) / f"{RANKED}-000005.jsonl")
    checkpoint = open_restored(made, find_checkpoint(f"{made.restore.path}/checkpoint_5"))
    task = seqio.get_mixture_or_task(RANKED)
    examples = list(
        task.get_dataset(None, "validation", shuffle=False, seed=42).take(12).as_numpy_iterator()
    )
    expected = score_examples(checkpoint.params, checkpoint.model, examples, None)
    np.testing.assert_allclose([row["score"] for row in rows], expected, rtol=1e-5)


def test_what_is_evaluated_is_not_evaluated_again_unless_the_settings_change(evaluated, capsys):
    made, _ = evaluated
    assert evaluate_checkpoints(made) == {}
    assert capsys.readouterr().err.count("evaluated before") == 2
    latest = dataclasses.replace(made, restore=dataclasses.replace(made.restore, mode="latest"))
    assert evaluate_checkpoints(latest) == {}
    fewer = dataclasses.replace(made.evaluator, num_examples=4)
    assert list(evaluate_checkpoints(dataclasses.replace(latest, evaluator=fewer))) == [5]
    (ref,) = choose_checkpoints(latest.restore)
    for name, changes in {
        "model": {"relative_attention_max_distance": 99},
        "dtypes": {"activation": "bfloat16"},
        "restore": {"dtype": "bfloat16"},
    }.items():
        changed = dataclasses.replace(getattr(latest, name), **changes)
        other = dataclasses.replace(latest, **{name: changed})
        assert is_evaluated(latest, ref) and not is_evaluated(other, ref)


def is_evaluated(made, ref):
    return EvaluatedCheckpoints(made).has(ref, identity(ref))


def test_a_checkpoint_is_known_by_its_own_path_however_it_is_given(
    model_dir, tmp_path, monkeypatch
):
    link, out = tmp_path / "latest", tmp_path / "out"
    link.symlink_to(model_dir)
    monkeypatch.chdir(model_dir)
    (ref,) = choose_checkpoints(plan(model_dir / "checkpoint_3", out).restore)
    EvaluatedCheckpoints(plan(ref.path, out)).add(ref, identity(ref))
    for given in ("checkpoint_3", "./checkpoint_3/", link / "checkpoint_3", f"file://{ref.path}"):
        made = plan(given, out)
        assert is_evaluated(made, choose_checkpoints(made.restore)[0]), given
    # The same words for another checkpoint.
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    link.unlink()
    link.symlink_to(other)
    monkeypatch.chdir(other)
    for given in ("checkpoint_3", link / "checkpoint_3"):
        made = plan(given, out)
        assert not is_evaluated(made, choose_checkpoints(made.restore)[0]), given


def test_a_checkpoint_that_was_replaced_at_its_path_is_evaluated_again(tmp_path, capsys):
    folder, out = tmp_path / "model", tmp_path / "out"
    made = plan(folder / "checkpoint_1", out, name=RANKED)
    path = save_checkpoint(folder, made, 1)
    first = evaluate_checkpoints(made)
    for file in path.rglob("*"):
        os.utime(file, (0, 0))  # as after a copy
    capsys.readouterr()
    assert evaluate_checkpoints(made) == {}
    shutil.rmtree(path)
    save_checkpoint(folder, made, 1, seed=1)
    capsys.readouterr()
    again = evaluate_checkpoints(made)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "evaluated again" in line]
    assert f"{path} has changed since it was evaluated" in line and foreign_lines(line) == []
    assert list(again) == [1] and again != first
    assert evaluate_checkpoints(made) == {} and "evaluated before" in capsys.readouterr().err
    (ref,) = choose_checkpoints(made.restore)
    shutil.rmtree(path)  # as by a training run's retention, after it was chosen
    assert is_evaluated(made, ref)


def test_an_earlier_versions_record_of_paths_alone_is_believed(model_dir, tmp_path):
    made = plan(model_dir / "checkpoint_3", tmp_path, name=RANKED)
    (ref,) = choose_checkpoints(made.restore)
    EvaluatedCheckpoints(made).add(ref, identity(ref))
    (path,) = tmp_path.rglob("evaluated.json")
    record = read_with_checksum(path)
    for row in record["evaluated"]:
        del row["identities"]
    path.unlink()
    write_with_checksum(tmp_path / "evaluated.json", record)  # where those versions had it
    assert evaluate_checkpoints(made) == {}
    # It is kept when another checkpoint is added.
    other = plan(model_dir / "checkpoint_5", tmp_path, name=RANKED)
    assert list(evaluate_checkpoints(other)) == [5]
    assert evaluate_checkpoints(made) == evaluate_checkpoints(other) == {}


def test_a_specific_checkpoint_in_another_format(model_dir, tmp_path):
    from t0repro.converters import convert

    path = tmp_path / "mtf"
    convert.convert(model_dir / "checkpoint_3", path, "mtf")
    results = evaluate_checkpoints(plan(path / "model.ckpt-3", tmp_path / "out", name=RANKED))
    direct = evaluate_checkpoints(plan(model_dir / "checkpoint_3", tmp_path / "o2", name=RANKED))
    assert results == direct and list(results) == [3]


def test_an_adapter_is_evaluated_as_the_checkpoint_that_it_is_merged_into(model_dir, tmp_path):
    from t0repro.converters import convert

    base, shape = model_dir / "checkpoint_3", plan("x", "y").model.shape
    adapter = save_adapter(tmp_path / "adapter", ia3(), base, shape)
    convert.convert(adapter, tmp_path / "merged", "jax")
    named = f"utils.RestoreCheckpointConfig.adapter = '{adapter}'"
    scored = [
        evaluate_checkpoints(plan(path, tmp_path / name, *bindings, name=RANKED))
        for name, path, *bindings in (
            ("own", adapter),
            ("whole", tmp_path / "merged" / adapter.name),
            ("named", base, named),
        )
    ]
    assert scored[0] == scored[1] == scored[2] and list(scored[0]) == [STEP]
    before, after = (
        open_restored(plan(path, tmp_path), find_checkpoint(path)) for path in (base, adapter)
    )
    assert before.digest != after.digest
    # A base that moved is named beside its adapter; another one is refused.
    shutil.copytree(base, tmp_path / "moved" / base.name)
    moved = plan(tmp_path / "moved" / base.name, tmp_path, named)
    (ref,) = choose_checkpoints(moved.restore)
    assert open_restored(moved, ref).digest == after.digest
    other = plan(model_dir / "checkpoint_5", tmp_path, named)
    (ref,) = choose_checkpoints(other.restore)
    with pytest.raises(UserError, match="trained on another base"):
        open_restored(other, ref)


def test_an_adapter_has_one_base(model_dir, tmp_path):
    named = "utils.RestoreCheckpointConfig.adapter = 'adapter'"
    with pytest.raises(UserError, match="an adapter has one base"):
        plan(model_dir, tmp_path, named, "utils.RestoreCheckpointConfig.mode = 'all'")
    latest = plan(model_dir, tmp_path, named, "utils.RestoreCheckpointConfig.mode = 'latest'")
    with pytest.raises(UserError, match="nothing to watch: an adapter has one base"):
        evaluate_checkpoints(latest, watch=True)
    whole = named.replace("'adapter'", f"'{model_dir}'")
    with pytest.raises(UserError, match="a whole model's, not an adapter's"):
        choose_checkpoints(plan(model_dir / "checkpoint_3", tmp_path, whole).restore)


@pytest.mark.parametrize("content", ["", "[]", '{"evaluated": [', "edited"])
def test_a_damaged_record_of_evaluations_is_not_believed(model_dir, tmp_path, content):
    made = plan(model_dir / "checkpoint_3", tmp_path, name=RANKED)
    (ref,) = choose_checkpoints(made.restore)
    EvaluatedCheckpoints(made).add(ref, identity(ref))
    (record,) = tmp_path.rglob("evaluated.json")
    assert evaluate_checkpoints(made) == {}
    text = record.read_text()
    record.write_text(
        text.replace("checkpoint_3", "checkpoint_5") if content == "edited" else content
    )
    assert list(evaluate_checkpoints(made)) == [3]


def test_an_evaluation_that_died_before_its_record_leaves_each_row_once(model_dir, tmp_path):
    made = plan(model_dir / "checkpoint_3", tmp_path, name=RANKED)
    evaluate_checkpoints(made)
    (metrics,) = tmp_path.rglob("*-metrics.jsonl")
    first = metrics.read_bytes()
    assert first.count(b"\n") == 1
    (record,) = tmp_path.rglob("evaluated.json")
    record.unlink()
    assert list(evaluate_checkpoints(made)) == [3]
    assert metrics.read_bytes() == first
    # Other metrics of the same step are added.
    metrics.write_bytes(b'{"step": 3, "accuracy": 77.0}\n')
    record.unlink()
    evaluate_checkpoints(made)
    assert metrics.read_bytes() == b'{"step": 3, "accuracy": 77.0}\n' + first


def test_names_are_mapped_as_the_file_says(model_dir, tmp_path):
    rules = r"[('target/decoder/(.*)', 'target/decoder/\\1')]"  # gin reads escapes
    mapped = plan(
        model_dir / "checkpoint_3", tmp_path / "mapped",
        f"utils.RestoreCheckpointConfig.assignment_map = {rules}", name=RANKED,
    )  # fmt: skip
    direct = plan(model_dir / "checkpoint_3", tmp_path / "direct", name=RANKED)
    assert evaluate_checkpoints(mapped) == evaluate_checkpoints(direct)


def test_a_shared_position_bias_fills_each_layers_own_with_and_without_rules(model_dir, tmp_path):
    checkpoint = model_dir / "checkpoint_3"
    shared = open_restored(plan(checkpoint, tmp_path), find_checkpoint(checkpoint)).params
    bias = {
        tower: shared[tower]["relpos_bias"]["rel_embedding"] for tower in ("encoder", "decoder")
    }
    for rules in (
        "()",
        r"[('target/decoder/(.*)', 'target/decoder/\\1')]",
        r"[('target/(.*)/layers_\\d+/relpos_bias/(.*)', 'target/\\1/relpos_bias/\\2')]",
    ):
        made = plan(checkpoint, tmp_path, f"utils.RestoreCheckpointConfig.assignment_map = {rules}")
        each = dataclasses.replace(made.model, position_bias_per_layer=True)
        params = open_restored(
            dataclasses.replace(made, model=each), find_checkpoint(checkpoint)
        ).params
        for tower, expected in bias.items():
            assert "relpos_bias" not in params[tower]
            for layer in range(2):
                found = params[tower][f"layers_{layer}"]["relpos_bias"]["rel_embedding"]
                np.testing.assert_array_equal(found, expected)


def test_watching_goes_on_as_checkpoints_come(model_dir, tmp_path):
    folder = tmp_path / "growing"
    folder.mkdir()
    made = plan(folder, tmp_path / "out", "utils.RestoreCheckpointConfig.mode = 'all'", name=RANKED)
    save_checkpoint(folder, made, 1)
    later = threading.Timer(0.5, lambda: save_checkpoint(folder, made, 2))
    later.start()
    assert list(evaluate_checkpoints(made, watch=True, until=2, seconds=0.1)) == [1, 2]
    later.join()
    with pytest.raises(UserError, match="nothing to watch"):
        evaluate_checkpoints(plan(model_dir, tmp_path, name=RANKED), watch=True)


def test_pairs_that_are_cut_off_within_an_example_are_told_once(model_dir, tmp_path, caplog):
    with pytest.raises(UserError, match="take a multiple of the numbers of choices"):
        evaluate_checkpoints(
            plan(model_dir, tmp_path, "seqio.Evaluator.num_examples = 5", name=RANKED)
        )
    assert "Failed to evaluate" not in caplog.text, "SeqIO's own words, before the message"


def test_faults_are_named(model_dir, tmp_path):
    with pytest.raises(UserError, match="No task of 'both_kinds' has a split 'test'") as caught:
        evaluate_checkpoints(plan(model_dir, tmp_path, "MIXTURE_OR_TASK_SPLIT = 'test'"))
    assert "Choose one of validation" in str(caught.value)
    with pytest.raises(UserError, match="another vocabulary than the model's") as caught:
        evaluate_checkpoints(
            plan(model_dir, tmp_path, "seqio.SentencePieceVocabulary.extra_ids = 7")
        )
    assert "seqio.SentencePieceVocabulary.extra_ids = 100" in str(caught.value)
    with pytest.raises(UserError, match="pack = True"):
        plan(model_dir, tmp_path, "utils.DatasetConfig.pack = True")
    with pytest.raises(UserError, match=r"tasks of 'both_kinds' are not cached \(2 of 2\)"):
        evaluate_checkpoints(plan(model_dir, tmp_path, "utils.DatasetConfig.use_cached = True"))


@pytest.mark.parametrize("argument", ["training_evaluator_cls", "fallback_init_rng"])
def test_what_an_evaluation_does_not_do_is_refused_by_name(argument):
    with pytest.raises(UserError, match=f"evaluate.{argument} = 17") as caught:
        plan("x", "y", f"evaluate.{argument} = 17")
    assert argument in caught.value.where


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("{predict}.decoder_params = {{'beams': 3}}", "no argument beams here"),
        ("{model}.decode_fn = @decoding.temperature_sample\ndecoding.temperature_sample.topp = 0.5",
         "at most one of topk"),
    ],
)  # fmt: skip
def test_decoding_that_is_not_done_is_refused_by_name(tmp_path, lines, message):
    with pytest.raises(UserError, match=message):
        read_eval_run(parsed_with(tmp_path, lines))


def parsed_with(folder, lines):
    """An evaluation with a user's file that binds how the model decodes."""
    model = "models.EncoderDecoderModel"
    lines = lines.format(model=model, predict=f"{model}.predict_batch_with_aux")
    path = folder / "decoding.gin"
    head = "from __gin__ import dynamic_registration\nfrom t5x import decoding, models\n"
    path.write_text(head.replace(", ", "\nfrom t5x import ") + lines + "\n")
    bindings = ("MIXTURE_OR_TASK_NAME = 'a'", "CHECKPOINT_PATH = 'b'", "EVAL_OUTPUT_DIR = 'c'")
    return parsed("eval", "eval", *bindings, files=(str(path),))


def test_a_beam_searchs_limits_reach_the_plan(tmp_path):
    lines = """{model}.decode_fn = @decoding.beam_search
decoding.beam_search.min_log_prob = -1.0
decoding.beam_search.max_decode_step = 3"""
    decoding = read_eval_run(parsed_with(tmp_path, lines)).decoding
    assert (decoding.min_log_prob, decoding.max_decode_step) == (-1.0, 3)


def test_gins_decoding_reaches_the_plan(tmp_path):
    lines = """{model}.decode_fn = @decoding.temperature_sample
{predict}.num_decodes = 3
{predict}.return_all_decodes = True
{predict}.decoder_params = {{'temperature': 0.5}}
decoding.temperature_sample:
  temperature = 0.9
  topk = 40
  max_decode_steps = 9
  max_decode_steps_hard_limit = 5
"""
    assert read_eval_run(parsed_with(tmp_path, lines)).decoding == DecodingPlan(
        "temperature_sample", 3, return_all_decodes=True, temperature=0.5, topk=40,
        max_decode_steps=5,
    )  # fmt: skip
