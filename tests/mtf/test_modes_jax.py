"""The evaluation modes on JAX and on Mesh TensorFlow, from one checkpoint: the same files."""

import json
import shutil
import struct
import threading
import time
from pathlib import Path

import mesh_commands as commands
import pytest

from ..helpers.own_lines import foreign_lines

pytestmark = pytest.mark.mtf

BACKENDS = ("mtf", "jax")
LINES = [
    "the house is red . which colour ?",
    "the car is blue . which colour ?",
    "",
    "the   boat is white",
    "# a stone",
]
ANSWERS = ["red", "green", "blue", "white"]


class Runs:
    """One model_dir of Mesh TensorFlow's for each stack, and what the modes leave there."""

    def __init__(self, trained: Path, server, root: Path):
        self.server, self.root = server, root
        self.printed: dict[str, str] = {}
        self.model_dirs = {name: shutil.copytree(trained, root / name) for name in BACKENDS}
        self.questions, self.answers = root / "questions.txt", root / "answers.txt"
        self.questions.write_text("\n".join(LINES) + "\n\n")
        self.answers.write_text("\n".join(ANSWERS * len(LINES)))

    def run(self, mode: str, mixture: str, *params: str, flags: tuple[str, ...] = ()) -> None:
        """Runs a mode on both stacks; `{dir}` stands for the model_dir."""
        for backend in BACKENDS:
            model_dir = self.model_dirs[backend]
            line = commands.evaluate(
                model_dir,
                mode,
                mixture,
                *(f"--gin_param={p}".replace("{dir}", str(model_dir)) for p in params),
                *flags,
                f"--backend={backend}",
            )
            code, text = self.server.run(line)
            assert code == 0 and foreign_lines(text) == [], text
            self.printed[backend] = text

    def run_api(self, mode: str, *flags: str) -> None:
        """Runs a mode of the Model API on both stacks."""
        for backend in BACKENDS:
            model_dir = self.model_dirs[backend]
            line = [
                f"--model_dir={model_dir}", "--module_import=tiny_tasks", "--use_model_api",
                "--gin_file=dataset.gin", "--gin_param=MIXTURE_NAME = 'tiny_train'",
                f"--mode={mode}", "--batch_size=4", "--input_sequence_length=32",
                "--target_sequence_length=8", f"--backend={backend}",
                *(flag.replace("{dir}", str(model_dir)) for flag in flags),
            ]  # fmt: skip
            code, text = self.server.run(line)
            assert code == 0 and foreign_lines(text) == [], text
            self.printed[backend] = text

    def texts(self, name: str) -> tuple[list[str], list[str]]:
        """The lines of a file that each stack wrote into its model_dir."""
        mtf, jax = (
            (self.model_dirs[backend] / name).read_text().split("\n") for backend in BACKENDS
        )
        return mtf, jax

    def metrics(self, split: str) -> tuple[dict, dict]:
        """Each stack's last line of metrics.jsonl, which must be of the split."""
        rows = []
        for backend in BACKENDS:
            text = (self.model_dirs[backend] / "metrics.jsonl").read_text()
            rows.append(json.loads(text.splitlines()[-1]))
            assert rows[-1]["split"] == split
        return rows[0], rows[1]


@pytest.fixture(scope="module")
def runs(trained, server, tmp_path_factory) -> Runs:
    return Runs(trained[0], server, tmp_path_factory.mktemp("modes"))


def test_eval_generates_mesh_tensorflows_texts_and_metrics(runs):
    runs.run("eval", "tiny_train")
    mtf, jax = runs.texts("validation_eval/tiny_generate_4_predictions")
    assert mtf == jax and len(jax) == 6 and all(jax[:5])
    mtf, jax = runs.texts("validation_eval/tiny_generate_targets")
    assert mtf == jax
    mtf, jax = runs.texts("validation_eval/tiny_generate_inputs")
    assert [str(line.encode()) for line in jax[:-1]] == mtf[:-1]
    mtf, jax = runs.metrics("validation")
    assert mtf == jax
    events = runs.model_dirs["jax"] / "validation_eval"
    assert list(events.glob("events.out.tfevents.*"))


def test_eval_with_beams_in_a_folder_of_its_own_and_without_sequence_length_agrees(runs):
    runs.run(
        "eval",
        "tiny_train",
        "Bitransformer.decode.beam_size = 3",
        "Bitransformer.decode.alpha = 0.9",
        "run.sequence_length = None",
        "run.eval_summary_dir = '{dir}/beams'",
        "run.eval_dir_suffix = 'three'",
        "mesh_eval_dataset_fn.num_eval_examples = 3",
    )
    mtf, jax = runs.texts("beams_three/tiny_generate_4_predictions")
    assert mtf == jax and len(jax) == 4


def test_perplexity_eval_agrees_in_every_metric(runs):
    runs.run("perplexity_eval", "tiny_train", "run.perplexity_eval_steps = 3")
    mtf, jax = runs.metrics("validation")
    assert mtf.keys() == jax.keys() and jax["num_eval_tokens"] > 5
    for name, value in mtf.items():
        expected = value if isinstance(value, str) else pytest.approx(value, rel=1e-5)
        assert jax[name] == expected, name
    value = f"neg_log_perplexity {jax['neg_log_perplexity']:.4g}"
    assert all("step 4\n  tiny_generate  " in text for text in runs.printed.values())
    assert all(value in text for text in runs.printed.values())
    folders = [{path.name for path in d.glob("eval_*")} for d in runs.model_dirs.values()]
    assert folders[0] == folders[1] == {"eval_tiny_generate_validation_24"}


@pytest.mark.always
@pytest.mark.parametrize("beam_size", [1, 4])
def test_infer_writes_mesh_tensorflows_file(runs, beam_size):
    runs.run(
        "infer",
        "tiny_train",
        "infer_checkpoint_step = 4",
        f"input_filename = '{runs.questions}'",
        f"output_filename = '{{dir}}/answers_{beam_size}'",
        f"Bitransformer.decode.beam_size = {beam_size}",
        "decode_from_file.repeats = 2",
        "run.batch_size = ('sequences_per_batch', 4)",
    )
    mtf, jax = runs.texts(f"answers_{beam_size}-4")
    assert mtf == jax and len(jax) == 2 * len(LINES) + 1
    assert jax[0] == jax[1] != ""


@pytest.mark.always
def test_score_from_strings_agrees_to_six_digits(runs):
    runs.run(
        "score_from_file",
        "tiny_train",
        f"inputs_filename = '{runs.questions}'",
        f"targets_filename = '{runs.answers}'",
        "scores_filename = '{dir}/strings'",
    )
    assert_scores_agree(runs, "strings", 4 * len(LINES))


@pytest.mark.always
def test_score_from_dataset_agrees_to_six_digits(runs):
    runs.run(
        "score_from_task",
        "tiny_eval",
        "scores_filename = '{dir}/dataset'",
        "run.dataset_split = 'validation'",
    )
    assert_scores_agree(runs, "dataset", 20)


def assert_scores_agree(runs: Runs, prefix: str, count: int) -> None:
    mtf, jax = ([float(x) for x in lines[:-1]] for lines in runs.texts(f"{prefix}.scores"))
    assert len(jax) == count
    assert jax == pytest.approx(mtf, rel=2e-5)
    for suffix in ("targets", "lengths"):
        mtf, jax = runs.texts(f"{prefix}.{suffix}")
        assert mtf == jax


# ---- The Model API ------------------------------------------------------------------------------


def test_the_model_apis_predict_and_score_agree(runs):
    predict = ("--output_file={dir}/predicted", "--beam_size=2")
    runs.run_api("predict", f"--input_file={runs.questions}", *predict)
    mtf, jax = runs.texts("predicted-4")
    assert mtf == jax and len(jax) == len(LINES) + 1
    runs.run_api(
        "score",
        f"--input_file={runs.questions}",
        f"--target_file={runs.answers}",
        "--output_file={dir}/api",
    )
    assert_scores_agree(runs, "api", 4 * len(LINES))


def test_the_model_apis_eval_agrees(runs):
    for model_dir in runs.model_dirs.values():
        (model_dir / "api_eval").mkdir()  # t5 0.9.4 fails without
    runs.run_api("eval", "--mixture_or_task=tiny_train", "--eval_summary_dir={dir}/api_eval")
    mtf, jax = runs.texts("api_eval/tiny_generate_4_predictions")
    assert mtf == jax[:-1]  # t5's own writer ends no last line


def test_the_model_api_trains_and_fine_tunes_on_jax(runs, server, tmp_path):
    model_dir = runs.model_dirs["jax"]
    tuned = [
        f"--model_dir={tmp_path}", "--module_import=tiny_tasks", "--use_model_api",
        "--gin_file=dataset.gin", "--gin_param=MIXTURE_NAME = 'tiny_train'",
        "--gin_param=MtfModel.learning_rate_schedule = 0.001",
        "--gin_param=MtfModel.save_checkpoints_steps = 2",
        "--mode=finetune", "--mixture_or_task=tiny_train", f"--pretrained_model_dir={model_dir}",
        "--train_steps=3", "--batch_size=4", "--input_sequence_length=32",
        "--target_sequence_length=8", "--backend=jax",
    ]  # fmt: skip
    code, text = server.run(tuned)
    assert code == 0, text
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [5, 6, 7]
    assert rows[0]["learning_rate"] == struct.unpack("f", struct.pack("f", 0.001))[0]
    assert (tmp_path / "checkpoint_7").is_dir()


# ---- Choosing and waiting for checkpoints --------------------------------------------------------


def test_eval_waits_for_checkpoints_until_the_step_to_stop_after(trained, server, tmp_path):
    model_dir = shutil.copytree(trained[0], tmp_path / "model")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for path in model_dir.glob("model.ckpt-4.*"):
        path.rename(hidden / path.name)
    first = model_dir / "validation_eval" / "tiny_generate_2_predictions"

    def bring_back():
        while not first.exists() and time.monotonic() < started + 300:
            time.sleep(0.1)
        time.sleep(3)
        # The index comes last, as in a save.
        for path in sorted(hidden.iterdir(), key=lambda path: path.suffix == ".index"):
            path.rename(model_dir / path.name)

    started = time.monotonic()
    thread = threading.Thread(target=bring_back)
    thread.start()
    code, text = server.run(
        [
            *commands.evaluate(model_dir, "eval", "tiny_train", "--backend=jax"),
            "--gin_param=run.eval_checkpoint_step = None",
            "--gin_param=get_checkpoint_iterator.stop_after = 4",
        ]
    )
    thread.join()
    assert code == 0, text
    done = {path.name for path in (model_dir / "validation_eval").glob("*_predictions")}
    assert done == {"tiny_generate_2_predictions", "tiny_generate_4_predictions"}
    assert f"waiting for a new checkpoint in {model_dir}" in text


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "params", "parts"),
    [
        ("eval", ["run.mode = 'export_infer'"], ["SavedModel", "t0repro convert", "--gin_param"]),
        ("eval", ["run.mode = 'evaluate'"], ["'evaluate'", "score_from_strings"]),
        (
            "eval",
            ["Bitransformer.decode.beam_size = 2", "Bitransformer.decode.temperature = 0.5"],
            ["beam search", "Bitransformer.decode.temperature = 0.5"],
        ),
        (
            "eval",
            ["Unitransformer.sample_autoregressive.never_end = True"],
            ["sample_autoregressive.never_end"],
        ),
        ("infer", ["infer_checkpoint_step = 4"], ["/path/to/inputs", "input_filename"]),
        (
            "infer",
            ["infer_model.decode_fn = @decode_from_dataset"],
            ["decode_from_dataset", "infer_model.decode_fn"],
        ),
        (
            "score_from_file",
            ["inputs_filename = ['a', 'b']", "targets_filename = ['c', 'd', 'e']"],
            ["3 targets", "2 inputs"],
        ),
        (
            "score_from_task",
            ["run.eval_checkpoint_step = 'all'", "run.dataset_split = 'validation'"],
            ["one checkpoint", "'all'"],
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name_and_place(runs, server, mode, params, parts):
    flags = [f"--gin_param={param}" for param in params]
    code, text = server.run(
        commands.evaluate(runs.model_dirs["jax"], mode, "tiny_train", *flags, "--backend=jax")
    )
    assert code == 2 and "Traceback" not in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--use_model_api"], "--mode=train"),
        (["--mode=eval"], "--use_model_api"),
        (["--use_model_api", "--mode=export_predict"], "t0repro convert"),
        (["--use_model_api", "--mode=eval", "--checkpoint_steps=3"], "--checkpoint_mode"),
        (
            ["--use_model_api", "--mode=eval", "--model_dir=/no/such"],
            "/no/such/operative_config.gin",
        ),
    ],
)
def test_flags_of_the_model_api_that_do_not_fit_are_refused(server, tmp_path, flags, part):
    common = ["--module_import=tiny_tasks", "--gin_file=dataset.gin", "--backend=jax"]
    mixture = "--gin_param=MIXTURE_NAME = 'tiny_train'"
    code, text = server.run([f"--model_dir={tmp_path / 'new'}", *common, mixture, *flags])
    assert code == 2 and part in text and "Traceback" not in text
    assert not (tmp_path / "new").exists()
