"""The best of each metric, from whatever a job wrote."""

from t0repro.cloud.vertex.google import storage_client
from t0repro.cloud.vertex.results import best_metrics, copy_results
from t0repro.event_files import event_writer
from tests.reports.suites import report_of, small_suite


def write(folder, tag, values):
    writer = event_writer(folder)
    for step, value in values.items():
        writer.write_scalars(step, {tag: value})
    writer.close()


def test_the_maximum_counts_with_the_first_step_that_reached_it(tmp_path):
    write(tmp_path / "inference_eval/a", "eval/accuracy", {0: 10.0, 5: 30.0, 10: 30.0, 15: 20.0})
    write(tmp_path / "inference_eval/b", "eval/f1", {5: float("nan"), 10: 1.0})
    assert best_metrics(tmp_path) == {
        "a/accuracy": 30.0, "a/accuracy/step": 5, "b/f1": 1.0, "b/f1/step": 10,
    }  # fmt: skip


def test_curves_that_went_on_in_another_file_are_one(tmp_path):
    write(tmp_path / "inference_eval/a", "eval/accuracy", {0: 10.0, 5: 40.0})
    write(tmp_path / "inference_eval/a", "eval/accuracy", {10: 30.0})
    assert best_metrics(tmp_path)["a/accuracy/step"] == 5


def test_mesh_tensorflows_evaluations_count_and_trainings_losses_do_not(tmp_path):
    write(tmp_path / "validation_eval", "eval/a/accuracy", {100: 50.0})
    write(tmp_path / "train", "loss", {100: 2.0})
    write(tmp_path / "training_eval/a", "loss", {100: 2.0})
    assert best_metrics(tmp_path) == {"a/accuracy": 50.0, "a/accuracy/step": 100}


def test_a_rank_evaluations_report_counts_with_the_step_of_its_checkpoint(tmp_path):
    evaluation = small_suite(tmp_path / "validation_eval")
    report = report_of(evaluation)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/report.json").write_text(report.to_json())
    found = best_metrics(tmp_path / "out")
    (news,) = [each for each in report.datasets if each.dataset == "ag_news"]
    assert found["rank_eval/ag_news"] == news.accuracy.mean
    assert found["rank_eval/ag_news/step"] == report.provenance.step
    (group,) = [each for each in report.groups if each.group == "held_out_datasets"]
    assert found["rank_eval/mean of held_out_datasets"] == group.mean


def test_files_that_grow_are_copied_once_and_then_what_was_added(cloud, tmp_path):
    client, here = storage_client("p"), tmp_path / "here"
    events = cloud.bucket / "m/train/events.out.tfevents.1"
    events.parent.mkdir(parents=True)
    (cloud.bucket / "m/checkpoint").write_bytes(b"large")
    events.write_bytes(b"one")
    copy_results(client, "gs://bucket/m", here)
    events.write_bytes(b"one two")
    copy_results(client, "gs://bucket/m", here)
    (copied,) = [path for path in here.rglob("*") if path.is_file()]
    assert copied.read_bytes() == b"one two"
