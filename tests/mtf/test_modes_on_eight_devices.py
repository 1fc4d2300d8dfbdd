"""score_eval, eval and infer of Mesh TensorFlow's dialect: eight devices give what one gives."""

import json
import shutil

import mesh_commands as commands
import numpy as np
import pytest

from t0repro.evaluation.outputs import read_task_scores

pytestmark = [pytest.mark.mtf, pytest.mark.slow]

LAYOUT = ("--backend=jax", "--gin_param=utils.run.mesh_shape = 'batch:4,model:2'")


@pytest.fixture(scope="module")
def model_dirs(trained, tmp_path_factory):
    """One copy of a trained model_dir for each number of devices."""
    root = tmp_path_factory.mktemp("devices")
    return {count: shutil.copytree(trained[0], root / str(count)) for count in (1, 8)}


@pytest.fixture(scope="module")
def evaluate(model_dirs, env):
    """Runs a mode on one device and on eight; {dir} stands for the model_dir."""
    flags = "--xla_force_host_platform_device_count="
    servers = {n: commands.CommandServer(env | {"XLA_FLAGS": f"{flags}{n}"}) for n in model_dirs}

    def run(mode, mixture, *params):
        for count, server in servers.items():
            folder = model_dirs[count]
            given = (f"--gin_param={each}".replace("{dir}", str(folder)) for each in params)
            line = commands.evaluate(folder, mode, mixture, *given, *LAYOUT)
            code, text = server.run(line)
            assert code == 0, text
            assert (f"devices: {count} x cpu, data 4, model 2" in text) == (count == 8), text

    yield run
    for server in servers.values():
        server.close()


def texts(model_dirs, name):
    one, eight = ((folder / name).read_text() for folder in model_dirs.values())
    return one, eight


def test_score_eval(evaluate, model_dirs):
    evaluate("score_eval", "tiny_eval")
    one, eight = (
        {task.task: task for task in read_task_scores(folder / "validation_eval", 4)}
        for folder in model_dirs.values()
    )
    assert one.keys() == eight.keys() and one
    for name, task in one.items():
        a_token = np.abs(eight[name].score - task.score) / task.target_length
        assert a_token.max() <= 1e-4, name
    for count, folder in model_dirs.items():  # eight devices round, and the report will say so
        facts = json.loads((folder / "validation_eval" / "provenance.json").read_text())
        rounded = "scores rounded by 2 devices that share each layer"
        assert facts["device"].endswith(rounded) == (count == 8)


def test_eval(evaluate, model_dirs):
    evaluate("eval", "tiny_train")
    one, eight = texts(model_dirs, "validation_eval/tiny_generate_4_predictions")
    assert one == eight and one.strip()


def test_infer(evaluate, model_dirs, tmp_path):
    questions = tmp_path / "questions.txt"
    # Not a multiple of the groups of devices.
    questions.write_text("\n".join(["the house is red . which colour ?"] * 3 + ["a stone"] * 2))
    evaluate(
        "infer",
        "tiny_train",
        "infer_checkpoint_step = 4",
        f"input_filename = '{questions}'",
        "output_filename = '{dir}/answers'",
    )
    one, eight = texts(model_dirs, "answers-4")
    assert one == eight and one.count("\n") >= 4
