"""`t0repro tasks export`: the harness's tasks hold what SeqIO's pipeline renders."""

import json
import warnings
from pathlib import Path

import pytest
import yaml

from t0repro.storage import buckets

from ..cli.commands import run

MIXTURE = "demo_eval_score_eval"


@pytest.fixture(scope="module")
def seqio_tasks():
    """Registers the demo's tasks with SeqIO."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's and T5's own, at import
        from t0repro.reports.prompts import load_prompts

        load_prompts(["t0repro.tasks.demo"], into_seqio=True)


def export(folder, *more):
    """The command's arguments that export the demo's evaluation."""
    module = "--module_import=t0repro.tasks.demo"
    return ["tasks", "export", str(folder), "--mixture", MIXTURE, module, *more]


@pytest.fixture(scope="module")
def exported(seqio_tasks, tmp_path_factory):
    from t0repro.lm_eval.files import export_tasks
    from t0repro.tasks.registry import select_tasks

    folder = tmp_path_factory.mktemp("export") / "demo"
    export_tasks(select_tasks(MIXTURE), "validation", folder, "demo_eval")
    return folder


def rows_of(folder, task):
    lines = (folder / "rows" / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_rows_are_the_texts_and_answers_of_seqios_pipeline(exported):
    import seqio

    tasks = [path.stem for path in (exported / "rows").glob("*.jsonl")]
    assert len(tasks) == 9
    for task in tasks:
        pairs = [
            (
                int(pair["idx"][0]),
                pair["inputs_pretokenized"].decode(),
                pair["targets_pretokenized"].decode(),
                bool(pair["is_correct"]),
            )
            for pair in seqio.TaskRegistry.get(f"{task}_score_eval")
            .get_dataset(None, split="validation", shuffle=False)
            .as_numpy_iterator()
        ]
        ours = [
            (row["example"], row["inputs"], choice, number == row["label"])
            for row in rows_of(exported, task)
            for number, choice in enumerate(row["choices"])
        ]
        assert ours == pairs, task


def test_tasks_name_fields_score_choices_by_their_sum_and_add_no_examples(exported):
    for path in (exported / "rows").glob("*.jsonl"):
        task = yaml.safe_load((exported / f"{path.stem}.yaml").read_text())
        assert task["task"] == path.stem and task["num_fewshot"] == 0
        assert task["dataset_kwargs"]["data_files"] == {"validation": str(path)}
        fields = (task["doc_to_text"], task["doc_to_choice"], task["doc_to_target"])
        assert fields == ("inputs", "choices", "label")
        assert [metric["metric"] for metric in task["metric_list"]] == ["acc"]


def test_each_dataset_and_the_suite_are_groups_whose_members_exist(exported):
    suite = yaml.safe_load((exported / "demo_eval.yaml").read_text())
    members = []
    for group in suite["task"]:
        content = yaml.safe_load((exported / f"{group}.yaml").read_text())
        assert content["aggregate_metric_list"][0]["weight_by_size"] is False
        members += content["task"]
    assert sorted(members) == sorted(path.stem for path in (exported / "rows").glob("*.jsonl"))


def test_the_command_writes_the_same_files_and_says_how_to_run_them(
    exported, tmp_path, monkeypatch, capsys
):
    code, printed, _ = run(monkeypatch, capsys, *export(tmp_path / "demo"))
    assert code == 0 and "Wrote 9 tasks" in printed and "--tasks demo_eval" in printed
    written = {path.relative_to(tmp_path / "demo") for path in (tmp_path / "demo").rglob("*")}
    assert written == {path.relative_to(exported) for path in exported.rglob("*")}


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_in_a_bucket_the_tasks_name_their_rows_by_address(exported, bucket, monkeypatch, capsys):
    code, printed, _ = run(monkeypatch, capsys, *export(bucket))
    assert code == 0 and f" to {bucket}, in " in printed and "/tmp/" not in printed
    names = {name for name in buckets.objects(bucket) if name.endswith(".jsonl")}
    assert len(names) == 9
    for name in names:
        task = yaml.safe_load(buckets.read(f"{bucket}/{Path(name).stem}.yaml"))
        assert task["dataset_kwargs"]["data_files"] == {"validation": f"{bucket}/{name}"}
        assert buckets.read(f"{bucket}/{name}") == (exported / name).read_bytes()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--split", "tset"], "has no split 'tset'"),
        (["--dataset", "nothing"], "no task of dataset 'nothing'"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    seqio_tasks, tmp_path, monkeypatch, capsys, more, words
):
    code, _, errors = run(monkeypatch, capsys, *export(tmp_path / "out", *more))
    assert code == 2 and words in " ".join(errors.split())
    assert not list(tmp_path.iterdir())


def test_a_folder_with_files_is_refused(seqio_tasks, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.txt").touch()
    code, _, errors = run(monkeypatch, capsys, *export(tmp_path))
    assert code == 2 and "not empty" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
