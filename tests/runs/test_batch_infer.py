"""T5X's run mode infer: its files, their lines, and continuing after an interruption."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import seqio
import tensorflow as tf

from t0repro.adapters import lora
from t0repro.config.t5x.run import read_infer_run
from t0repro.converters.finding import find_checkpoint
from t0repro.errors import UserError
from t0repro.evaluation.engine import score_examples
from t0repro.evaluation.model_functions import ModelFunctions
from t0repro.runs.batch_infer import infer
from t0repro.runs.restored_checkpoints import choose_checkpoints, is_there, open_restored

from ..evaluation.small_model import save_adapter
from ..helpers.own_lines import foreign_lines
from .tiny_gin import parsed, save_checkpoint

TASK = "demo_synthetic_glue_mrpc_want_to_know_score_eval"


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The demo's tasks."""
    import t0repro.tasks.demo  # noqa: F401


def plan(checkpoint, output, *bindings, name=TASK, files=()):
    return read_infer_run(
        parsed(
            "infer", "infer", f"MIXTURE_OR_TASK_NAME = '{name}'",
            f"CHECKPOINT_PATH = '{checkpoint}'", f"INFER_OUTPUT_DIR = '{output}'",
            "MIXTURE_OR_TASK_SPLIT = 'validation'",
            "TASK_FEATURE_LENGTHS = {'inputs': 96, 'targets': 6}",
            "utils.DatasetConfig.batch_size = 4", "infer.checkpoint_period = 2",
            "utils.RestoreCheckpointConfig.dtype = 'float32'", *bindings, files=files,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of random parameters."""
    return save_checkpoint(tmp_path_factory.mktemp("model"), plan("x", "y"), 7)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A task of the first 10 rows, 20 examples: three chunks of 8, the last of them not full."""
    whole = seqio.TaskRegistry.get(TASK)

    def rows(split, shuffle_files, seed=None):
        return whole.source.get_dataset(split, shuffle=False).take(10)

    seqio.TaskRegistry.add(
        "few_examples",
        seqio.FunctionDataSource(rows, splits=("validation",)),
        preprocessors=whole.preprocessors,
        output_features=whole.output_features,
    )
    yield "few_examples"
    seqio.TaskRegistry.remove("few_examples")


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def examples(name, lengths):
    return list(
        seqio.get_mixture_or_task(name)
        .get_dataset(lengths, "validation", shuffle=False, num_epochs=1, seed=0)
        .as_numpy_iterator()
    )


def test_scores_are_written_in_t5xs_form(checkpoint, few, tmp_path):
    made = plan(checkpoint, tmp_path, "infer.mode = 'score'", name=few)
    assert infer(made) == [tmp_path / "few_examples-score.jsonl-00000-of-00001"]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "few_examples-score.jsonl-00000-of-00001",
        "few_examples-score.jsonl-00000-of-00001.COMPLETED",
    ]
    rows, read = lines_of(tmp_path / names[0]), examples(few, made.data.sequence_length)
    assert len(rows) == len(read) > 16 and set(rows[0]) == {"inputs", "score"}
    for row, example in zip(rows, read, strict=True):
        assert row["inputs"] == {
            name: example[name].decode() for name in ("inputs_pretokenized", "targets_pretokenized")
        }
    opened_one = open_restored(made, choose_checkpoints(made.restore)[0])
    expected = score_examples(opened_one.params, opened_one.model, read, None)
    np.testing.assert_allclose([row["score"] for row in rows], expected, rtol=1e-5)


def test_a_split_that_no_task_has_is_a_message_with_those_there_are(checkpoint, few, tmp_path):
    made = plan(checkpoint, tmp_path, "MIXTURE_OR_TASK_SPLIT = 'test'", name=few)
    with pytest.raises(UserError, match="has a split 'test'[^$]*one of validation"):
        infer(made)


def test_a_mixtures_tasks_without_the_split_are_left_out(checkpoint, few, tmp_path, capsys):
    other = "demo_synthetic_ag_news_classify"  # of training rows alone
    assert "validation" not in seqio.TaskRegistry.get(other).splits
    seqio.MixtureRegistry.add("few_and_other", [few, other], default_rate=1.0)
    try:
        made = plan(checkpoint, tmp_path, "infer.mode = 'score'", name="few_and_other")
        assert infer(made) == [tmp_path / "few_examples-score.jsonl-00000-of-00001"]
    finally:
        seqio.MixtureRegistry.remove("few_and_other")
    assert "left out: 1 task without a split 'validation'" in capsys.readouterr().err


def test_predictions_carry_texts_ids_and_scores_of_all_beams(checkpoint, few, tmp_path):
    path = tmp_path / "more.gin"
    path.write_text(
        "from __gin__ import dynamic_registration\n"
        "import __main__ as infer_script\n"
        "from t5x import models\n"
        "infer_script.infer.write_fn = @infer_script.write_inferences_to_file\n"
        "infer_script.write_inferences_to_file.output_ids = True\n"
        "infer_script.write_inferences_to_file.input_fields_to_include = ['targets']\n"
        "models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 2\n"
        "models.EncoderDecoderModel.predict_batch_with_aux.return_all_decodes = True\n"
    )
    made = plan(
        checkpoint, tmp_path, "infer.mode = 'predict_with_aux'", name=few, files=(str(path),)
    )
    (written,) = infer(made)
    rows, vocabulary = lines_of(written), seqio.TaskRegistry.get(few).output_features["targets"]
    for row in rows:
        assert list(row) == ["inputs", "prediction", "prediction_tokens", "aux"]
        assert set(row["inputs"]) == {"targets", "targets_pretokenized"}
        assert len(row["prediction"]) == 2 and row["aux"]["scores"][0] <= row["aux"]["scores"][1]
        decoded = [vocabulary.vocabulary.decode(ids) for ids in row["prediction_tokens"]]
        assert decoded == row["prediction"]
    best = plan(checkpoint, tmp_path / "best", name=few)
    assert not best.decoding.return_all_decodes
    assert isinstance(lines_of(infer(best)[0])[0]["prediction"], str)


@pytest.mark.always
def test_an_interrupted_run_continues_after_its_last_whole_chunk(
    checkpoint, few, tmp_path, monkeypatch, capsys
):
    made = plan(checkpoint, tmp_path / "a", "infer.mode = 'score'", name=few)
    undisturbed = infer(dataclasses.replace(made, output_dir=str(tmp_path / "b")))[0].read_bytes()
    score, calls = ModelFunctions.score, []

    def failing(self, dataset):
        calls.append(self.seed)
        if len(calls) == 2:
            raise OSError("the power went off")
        return score(self, dataset)

    monkeypatch.setattr(ModelFunctions, "score", failing)
    with pytest.raises(OSError, match="power"):
        infer(made)
    assert not [*(tmp_path / "a").glob("*.COMPLETED")] and calls == [0, 1]
    (written,) = infer(made)
    said = capsys.readouterr().err
    assert calls == [0, 1, 1, 2] and "continues after 1 chunk" in said
    # Of the whole task, what was done before the interruption included.
    assert [line for line in said.splitlines() if line.endswith("so far")][-1].endswith(
        f" {len(undisturbed.splitlines())} examples so far"
    )
    assert written.read_bytes() == undisturbed
    infer(made)
    assert len(calls) == 4 and "already complete" in capsys.readouterr().err


@pytest.mark.parametrize("merge", [True, False])
def test_a_damaged_file_is_not_believed_and_written_again(
    checkpoint, few, tmp_path, monkeypatch, merge
):
    made = plan(checkpoint, tmp_path, "infer.mode = 'score'", name=few)
    made = dataclasses.replace(made, merge=merge)
    infer(made)
    (path, *_) = sorted(tmp_path.glob("*00001" if merge else "tmp*/*chunk00001"))
    whole, score, calls = path.read_bytes(), ModelFunctions.score, []
    monkeypatch.setattr(
        ModelFunctions, "score", lambda self, data: (calls.append(self.seed), score(self, data))[1]
    )
    edited = whole.replace(b'"score": -', b'"score": -1', 1)
    for damaged in (edited, whole[:-9], b"", None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        infer(made)
        assert path.read_bytes() == whole
    assert calls == [0, 1, 2] * 4 if merge else [1, 2] * 4
    infer(made)
    assert len(calls) == (12 if merge else 8)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("merge", [True, False])
def test_a_complete_result_of_another_checkpoint_is_kept_and_of_other_settings_made_again(
    checkpoint, few, tmp_path, capsys, merge
):
    def results(path, **changes):
        made = plan(path, tmp_path / "out", "infer.mode = 'score'", name=few)
        (written,) = infer(dataclasses.replace(made, merge=merge, **changes))
        chunks = [written] if merge else sorted(written.parent.glob("tmp*/*chunk0000?"))
        return "".join(path.read_text() for path in chunks), capsys.readouterr().err

    other = tmp_path / "checkpoint_9"
    shutil.copytree(checkpoint, other)
    first, _ = results(checkpoint)
    again, said = results(f"{checkpoint}/")
    assert again == first and "already complete" in said
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match="complete, and was made from another checkpoint"):
        results(other)
    assert contents(tmp_path / "out") == before
    more, said = results(checkpoint, all_inputs=True)
    assert "made with other settings; done again" in said and more != first
    shutil.rmtree(other)
    assert "already complete" in results(other)[1]


@pytest.mark.parametrize("merge", [True, False])
def test_a_complete_result_of_a_checkpoint_that_was_replaced_is_made_again(
    few, tmp_path, capsys, merge
):
    made = plan(tmp_path / "checkpoint_7", tmp_path / "out", "infer.mode = 'score'", name=few)
    made = dataclasses.replace(made, merge=merge)

    def results():
        (written,) = infer(made)
        chunks = [written] if merge else sorted(written.parent.glob("tmp*/*chunk0000?"))
        return "".join(path.read_text() for path in chunks), capsys.readouterr().err

    path = save_checkpoint(tmp_path, made, 7)
    first, _ = results()
    for file in path.rglob("*"):
        os.utime(file, (0, 0))  # as after a copy
    assert "already complete" in results()[1]
    shutil.rmtree(path)
    save_checkpoint(tmp_path, made, 7, seed=1)
    second, said = results()
    assert second != first and "already complete" not in said
    assert f"{path} has changed since; done again" in said and foreign_lines(said) == []
    assert "already complete" in results()[1]
    # Another marker, such as T5X's, which is empty, does not say what a result was made from.
    (marker,) = (tmp_path / "out").glob("few*.COMPLETED")
    lines = marker.read_text().splitlines()
    marker.write_text("\n".join(lines[:3]))  # an earlier version's, without the path
    assert "already complete" in results()[1]
    for others in ([], lines[:1], lines[:2], [*lines, "more"]):
        marker.write_text("\n".join(others))
        again, said = results()
        assert again == second and "already complete" not in said


def test_chunks_of_a_checkpoint_that_was_replaced_are_not_continued(
    few, tmp_path, capsys, monkeypatch
):
    made = plan(tmp_path / "checkpoint_7", tmp_path / "out", "infer.mode = 'score'", name=few)
    path = save_checkpoint(tmp_path, made, 7)
    score = ModelFunctions.score

    def failing(self, dataset):
        if self.seed == 1:
            raise OSError("the power went off")
        return score(self, dataset)

    with monkeypatch.context() as patched:
        patched.setattr(ModelFunctions, "score", failing)
        with pytest.raises(OSError, match="power"):
            infer(made)
    shutil.rmtree(path)
    save_checkpoint(tmp_path, made, 7, seed=1)
    (written,) = infer(made)
    said = capsys.readouterr().err
    assert "made from another checkpoint or with other settings; started over" in said
    assert foreign_lines(said) == []
    undisturbed = infer(dataclasses.replace(made, output_dir=str(tmp_path / "b")))[0]
    assert written.read_bytes() == undisturbed.read_bytes()


def test_chunks_of_another_checkpoint_are_not_continued(checkpoint, few, tmp_path, capsys):
    made = plan(checkpoint, tmp_path, "infer.mode = 'score'", name=few)
    stale = tmp_path / "tmp-few_examples-00000-of-00001"
    stale.mkdir()
    (stale / "settings.json").write_text("{}\n")
    chunk = stale / "few_examples-score.jsonl-00000-of-00001-chunk00000"
    chunk.write_text("stale\n")
    chunk.with_name(f"{chunk.name}.COMPLETED").write_text("")
    (written,) = infer(made)
    assert "started over" in capsys.readouterr().err and "stale" not in written.read_text()


def test_shards_have_all_examples_between_them(checkpoint, few, tmp_path):
    whole = plan(checkpoint, tmp_path, "infer.mode = 'score'", name=few)
    expected = lines_of(infer(whole)[0])
    shards = [dataclasses.replace(whole, shard_id=shard, num_shards=2) for shard in range(2)]
    files = [infer(shard)[0] for shard in shards]
    assert files[1].name == "few_examples-score.jsonl-00001-of-00002"
    rows = [row for path in files for row in lines_of(path)]

    def texts(rows):
        return sorted(json.dumps(row["inputs"]) for row in rows)

    assert texts(rows) == texts(expected)


@pytest.mark.parametrize("merge", [True, False])
def test_a_shard_without_examples_is_complete_and_empty(checkpoint, few, tmp_path, capsys, merge):
    """The 20 examples of the task are in the first 20 of 22 shards."""
    made = plan(checkpoint, tmp_path, "infer.mode = 'score'", name=few)
    made = dataclasses.replace(made, shard_id=21, num_shards=22, merge=merge)
    (written,) = infer(made)
    said = capsys.readouterr().err
    assert "few_examples has no example in shard 21 of 22" in said
    assert written.read_text() == "" if merge else not [*tmp_path.rglob("*chunk?????")]
    infer(made)
    assert "already complete" in capsys.readouterr().err


@pytest.mark.parametrize("shards", [1, 2])
def test_a_task_without_examples_is_named_in_every_shard(checkpoint, few, tmp_path, shards):
    whole = seqio.TaskRegistry.get(few)

    def rows(split, shuffle_files, seed=None):
        return whole.source.get_dataset(split, shuffle=False).take(0)

    seqio.TaskRegistry.add(
        "no_examples",
        seqio.FunctionDataSource(rows, splits=("validation",)),
        preprocessors=whole.preprocessors,
        output_features=whole.output_features,
    )
    try:
        made = plan(checkpoint, tmp_path, name="no_examples")
        with pytest.raises(UserError, match="'no_examples' has no example to infer from"):
            infer(dataclasses.replace(made, shard_id=shards - 1, num_shards=shards))
    finally:
        seqio.TaskRegistry.remove("no_examples")


@pytest.mark.parametrize("kind", ["tfrecord", "jsonl"])
def test_examples_from_files(checkpoint, tmp_path, kind):
    rows = [{"question": f"is {word} a colour?", "answer": "yes"} for word in ("red", "five")]
    path = tmp_path / f"examples.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with tf.io.TFRecordWriter(str(path)) as writer:
            for row in rows:
                feature = {
                    key: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
                    for key, text in row.items()
                }
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())
    made = read_infer_run(
        parsed(
            "infer", "infer_from_tfexample_file", f"TF_EXAMPLE_FILE_PATHS = ['{path}']",
            f"TF_EXAMPLE_FILE_TYPE = '{kind}'", "FEATURE_LENGTHS = {'inputs': 32, 'targets': 8}",
            f"CHECKPOINT_PATH = '{checkpoint}'", f"INFER_OUTPUT_DIR = '{tmp_path}'",
            "infer.mode = 'score'",
            "create_task_from_tfexample_file.inputs_key = 'question'",
            "create_task_from_tfexample_file.targets_key = 'answer'",
        )
    )  # fmt: skip
    (written,) = infer(made)
    assert written.name.startswith("infer_") and written.name.endswith(
        "-score.jsonl-00000-of-00001"
    )
    assert [row["inputs"] for row in lines_of(written)] == [
        {"inputs_pretokenized": row["question"], "targets_pretokenized": "yes"} for row in rows
    ]
    seqio.TaskRegistry.remove(made.files.name)


def test_a_folder_stands_for_its_latest_checkpoint(checkpoint, tmp_path):
    made = plan(checkpoint.parent, tmp_path, "utils.RestoreCheckpointConfig.mode = 'latest'")
    save_checkpoint(checkpoint.parent, made, 3)
    assert [ref.path for ref in choose_checkpoints(made.restore)] == [str(checkpoint)]


def test_an_adapter_is_read_as_the_checkpoint_that_it_is_merged_into(checkpoint, tmp_path):
    from t0repro.converters import convert

    shape = plan("x", "y").model.shape
    adapter = save_adapter(tmp_path / "adapter", lora(rank=2), checkpoint, shape)
    convert.convert(adapter, tmp_path / "merged", "jax")
    paths = (adapter, tmp_path / "merged" / adapter.name, checkpoint)
    own, whole, base = (open_restored(plan(p, tmp_path), find_checkpoint(p)).digest for p in paths)
    assert own == whole != base
    named = f"utils.RestoreCheckpointConfig.adapter = '{adapter}'"
    made = plan(checkpoint, tmp_path, named)
    assert is_there(made.restore)
    (ref,) = choose_checkpoints(made.restore)
    assert open_restored(made, ref).digest == own
    assert not is_there(dataclasses.replace(made.restore, adapter=str(tmp_path / "absent")))


@pytest.mark.parametrize("argument", ["write_fn", "merge_fn", "fallback_init_rng"])
def test_what_an_inference_does_not_do_is_refused_by_name(argument):
    with pytest.raises(UserError, match=f"infer.{argument} = 17") as caught:
        plan("x", "y", f"infer.{argument} = 17")
    assert argument in caught.value.where


def test_faults_are_named(checkpoint, few, tmp_path):
    with pytest.raises(UserError, match="it must be 'predict'"):
        plan(checkpoint, tmp_path, "infer.mode = 'guess'")
    with pytest.raises(UserError, match="shards are numbered from 0"):
        plan(checkpoint, tmp_path, "infer.shard_id = 1")
    with pytest.raises(UserError, match="takes one checkpoint"):
        plan(checkpoint, tmp_path, "utils.RestoreCheckpointConfig.mode = 'all'")
    with pytest.raises(UserError, match="'no_such_task'"):
        infer(plan(checkpoint, tmp_path, name="no_such_task"))
    with pytest.raises(UserError, match=r"not cached \(1 of \d+\): demo_synthetic_glue"):
        infer(plan(checkpoint, tmp_path, "utils.DatasetConfig.use_cached = True"))
