"""Tasks without answer choices beside ranked ones, in one evaluation and one report."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from t0repro.cli.options import ReportHead
from t0repro.config.decoding import GREEDY
from t0repro.errors import UserError
from t0repro.evaluation.evaluation_folder import EvaluationSettings
from t0repro.evaluation.generation import decode_texts, generate_tokens
from t0repro.evaluation.opened import open_checkpoint
from t0repro.evaluation.reading import TaskReader
from t0repro.evaluation.records import read_records
from t0repro.evaluation.selection import check_vocabulary, select_tasks
from t0repro.reports.report import load_report
from t0repro.runs import rank_eval
from t0repro.runs.rank_report import write_results
from t0repro.tasks.template_registration import register_templates

SETTINGS = EvaluationSettings(
    lengths={"inputs": 64, "targets": 8}, limit=4, modes=("rank", "generate")
)
RANKED = "demo_synthetic_ag_news_classify_with_choices_question_first"
DECODED, MIXTURE = "headline_of_article", "news_of_both_kinds"


@pytest.fixture(scope="module")
def mixture(prompts):
    """A prompt with answer choices, and one whose target is free text."""
    import seqio
    import tensorflow as tf
    from t5.evaluation import metrics

    rows = [{"inputs": f"Say news number {n} again.", "targets": f"News {n}"} for n in range(6)]

    def read(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices(
            {name: [row[name] for row in rows] for name in ("inputs", "targets")}
        )

    features = seqio.get_mixture_or_task(RANKED).output_features
    seqio.TaskRegistry.add(
        DECODED,
        seqio.FunctionDataSource(read, splits=("validation",)),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features=features,
        metric_fns=[metrics.rouge, metrics.sequence_accuracy],
    )
    seqio.MixtureRegistry.add(MIXTURE, [RANKED, DECODED], default_rate=1)
    yield MIXTURE
    seqio.MixtureRegistry.remove(MIXTURE)
    seqio.TaskRegistry.remove(DECODED)


def evaluate(model_dir, out, prompts, settings, mixture):
    checkpoint = open_checkpoint(str(model_dir), None, "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # t5's metrics, of few examples
        outcome = rank_eval.rank_eval(checkpoint, mixture, out, settings)
    return checkpoint, outcome


def test_prompts_with_choices_are_ranked_and_others_decoded_in_one_report(
    model_dir,
    prompts,
    mixture,
    tmp_path,
):
    checkpoint, outcome = evaluate(model_dir, tmp_path, prompts, SETTINGS, mixture)
    assert (outcome.tasks, outcome.generated) == ((f"{RANKED}_score_eval",), (DECODED,))
    assert (outcome.scored, outcome.decoded) == (16, 4)
    options = ReportHead(title="Both", train_mixture=[RANKED], resamples=100).report_options(
        prompts
    )
    report, paths = write_results(outcome, [7], tmp_path, prompts, options, label="jax")
    assert [p.task for d in report.datasets for p in d.prompts] == [f"{RANKED}_score_eval"]
    (found,) = report.generation
    assert (found.task, found.examples, found.group) == (DECODED, 4, "held_out_datasets")
    assert {"rouge1", "rougeLsum", "sequence_accuracy"} <= found.metrics.keys()
    assert found.first_input == "Say news number 0 again." and found.first_target == "News 0"
    assert load_report(tmp_path) == report and paths[-1].name == "scores.parquet"
    assert DECODED in (tmp_path / "report.md").read_text().split("## Decoded")[1]
    assert "<h2>Decoded</h2>" in (tmp_path / "report.html").read_text()
    assert '"headline_of_article/rouge1"' in (tmp_path / "metrics.jsonl").read_text()
    # The texts are those of greedy decoding, and the metrics t5's of them
    reader = TaskReader(DECODED, "validation", SETTINGS.lengths, 4)
    examples = list(reader.examples())
    tokens = generate_tokens(
        checkpoint.params,
        checkpoint.model,
        [example["inputs"] for example in examples],
        GREEDY,
        length=8,
        batch_size=4,
    )
    import seqio

    vocabulary = seqio.get_mixture_or_task(DECODED).output_features["targets"].vocabulary
    texts = decode_texts(tokens, vocabulary)
    lines = (outcome.folder / f"{DECODED}_7_predictions").read_text().split("\n")[:-1]
    assert lines == [text.replace("\n", " ") for text in texts]
    record = read_records(outcome.folder, 7)[DECODED]
    expected = reader.judge.metrics_of(examples, texts)["sequence_accuracy"]
    assert record["metrics"]["sequence_accuracy"] == expected
    # What reads scores passes decoded tasks over
    from t0repro.reports.comparison import compare_runs
    from t0repro.reports.history import read_history
    from t0repro.reports.make_report import ReportOptions, make_report
    from t0repro.reports.run import Run
    from t0repro.reports.statistics import Bootstrap

    run, quick = Run("jax", outcome.folder), Bootstrap(100)
    assert compare_runs(run, run, prompts, quick).flipped == 0
    assert read_history(outcome.folder, prompts).steps == (7,)
    made = make_report(run, prompts, ReportOptions(bootstrap=quick))
    assert [found.task for found in made.generation] == [DECODED] and len(made.datasets) == 1
    _, again = evaluate(model_dir, tmp_path, prompts, SETTINGS, mixture)
    assert set(again.finished) == {f"{RANKED}_score_eval", DECODED}
    assert again.decoded == again.scored == 0
    assert np.isfinite(list(found.metrics.values())).all()


def test_a_mode_that_a_task_does_not_have_is_refused(
    model_dir,
    prompts,
    mixture,
    tmp_path,
):
    for modes, task, message in (
        (("rank",), DECODED, "have no answer choices to rank: headline_of_article"),
        (
            ("generate",),
            f"{RANKED}_score_eval",
            "have answer choices to rank: demo_synthetic_ag_news_cl",
        ),
    ):
        settings = EvaluationSettings(modes=modes)
        with pytest.raises(UserError, match=message):
            evaluate(model_dir, tmp_path, prompts, settings, task)


def test_choices_without_what_separates_them_are_refused(tmp_path, monkeypatch):
    rows = tmp_path / "single_choice" / "default" / "validation.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text('{"text": "Fine."}\n')
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(tmp_path))
    (tmp_path / "mine.yaml").write_text(
        "dataset: single_choice\ntemplates:\n  5b1c9f7e-0000-0000-0000-000000000001: !Template\n"
        "    name: ask\n    jinja: '{{text}} ||| yes'\n    answer_choices: no, yes\n"
    )
    register_templates(tmp_path / "mine.yaml")
    with pytest.raises(UserError, match="always ranks first: single_choice_ask_score") as error:
        select_tasks("single_choice_ask_score_eval", EvaluationSettings())
    assert "answer_choices: no, yes" in str(error.value) and "|||" in str(error.value)


def test_tasks_without_a_metric_are_left_out_of_t0s_training_mixture(tmp_path, monkeypatch):
    import t0repro.tasks.t0  # noqa: F401  registers them

    rows = tmp_path / "adversarial_qa" / "dbert" / "validation.jsonl"
    rows.parent.mkdir(parents=True)
    rows.touch()
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(tmp_path))
    both = EvaluationSettings(modes=("rank", "generate"), skip_missing=True)
    selected = select_tasks("t0_train", both)
    assert selected.left_out["app_reviews_generate_review"] == "no metric"
    assert "adversarial_qa_dbert_based_on" in selected.generated
    with pytest.raises(UserError, match="have no metric: app_reviews_generate_review"):
        settings = EvaluationSettings("train", modes=("generate",))
        select_tasks("app_reviews_generate_review", settings)


def test_a_task_without_inputs_is_refused_before_it_is_read():
    seqio = pytest.importorskip("seqio")
    feature = seqio.Feature(seqio.PassThroughVocabulary(8))
    source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, ["train"])
    features = {"question": feature, "answer": feature}
    seqio.TaskRegistry.add("of_questions", source, preprocessors=[], output_features=features)
    model = SimpleNamespace(config=SimpleNamespace(decoder_only=False, vocab_size=8))
    checkpoint = SimpleNamespace(model=model, path="a checkpoint", folders=())
    try:
        with pytest.raises(UserError, match="of_questions has no inputs and no targets"):
            check_vocabulary(["of_questions"], checkpoint)
    finally:
        seqio.TaskRegistry.remove("of_questions")
