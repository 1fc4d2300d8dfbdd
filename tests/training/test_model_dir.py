"""What is refused before training goes on in a model_dir, and what the folder holds afterward."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from t0repro.config.configuration import Configuration, RunInputs
from t0repro.config.optimizer import AdamWeightDecayConfig, MomentumConfig, SgdConfig
from t0repro.errors import UserError
from t0repro.model.t5 import T5
from t0repro.parameters.shape import ALL_HEURISTIC
from t0repro.progress import heard_by
from t0repro.runs.start import start_configured
from t0repro.runs.train import train
from t0repro.training.checkpoints import load_tree, save_tree
from t0repro.training.model_dir import check_model_dir, check_slots, lock_for_training
from t0repro.training.optimizers import make_optimizer
from t0repro.training.train_state import state_shapes

from ..helpers import tiny_models as tiny
from . import resume_run


def trained(model_dir, **changes):
    config = tiny.run_config(model_dir, 2, **changes)
    with lock_for_training(model_dir, "jax", config) as check:
        train(config, tiny.batches(2), check=check)
    return config


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("model")
    trained(model_dir)
    return model_dir


@pytest.fixture
def model_dir(once, tmp_path):
    """A folder with a checkpoint of step 2, to do harm to."""
    return shutil.copytree(once, tmp_path / "model")


def check(model_dir, backend="jax", allow_changed=False, **changes):
    config = tiny.run_config(model_dir, 4, **changes)
    reader = check_model_dir(model_dir, backend, config, allow_changed=allow_changed)
    if reader is not None and not allow_changed:
        network = T5(config.model, config.dtypes)
        check_slots(reader, state_shapes(network, make_optimizer(config.optimizer)))


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".t0repro")
    }


def test_the_same_run_goes_on_and_so_does_one_with_another_loss_or_schedule(model_dir):
    check(model_dir)
    softer = dataclasses.replace(tiny.MODEL, dropout_rate=0.1, label_smoothing=0.1, z_loss=0.0)
    schedule = dataclasses.replace(tiny.SCHEDULE, arguments={"learning_rate": 0.1})
    check(model_dir, model=softer, schedule=schedule)
    # T5X's rules, in which T5's parameters are factored as in Mesh TensorFlow.
    check(model_dir, optimizer=dataclasses.replace(tiny.ADAFACTOR, factor_map=ALL_HEURISTIC))


def test_a_start_with_no_step_left_keeps_the_record_of_what_trained_the_checkpoints(model_dir):
    before = contents(model_dir)
    softer = dataclasses.replace(tiny.MODEL, dropout_rate=0.1)
    described = []
    config = tiny.run_config(model_dir, 2, model=softer)
    with lock_for_training(model_dir, "jax", config) as check:
        train(config, tiny.batches(2), check=check, describe=lambda *_: described.append(1))
    assert contents(model_dir) == before and not described


def test_a_change_of_what_may_change_is_said_where_the_run_goes_on(model_dir):
    def said_by_a_start_with(**changes):
        said = []
        config = tiny.run_config(model_dir, 4, **changes)
        with heard_by(said.append), lock_for_training(model_dir, "jax", config) as check:
            check(None)()
        return [line for line in said if "changed since" in line]

    softer = dataclasses.replace(tiny.MODEL, dropout_rate=0.1)
    schedule = dataclasses.replace(tiny.SCHEDULE, arguments={"learning_rate": 0.1})
    assert said_by_a_start_with() == []
    places = {"num_microbatches": "my.gin:3"}
    (line,) = said_by_a_start_with(
        model=softer,
        schedule=schedule,
        dtypes=tiny.BFLOAT16,
        num_microbatches=1,
        plan=dataclasses.replace(tiny.run_config(model_dir, 4).plan, random_seed=7),
        provenance=places,
    )
    for change in (
        "model.dropout_rate was 0.0 and is 0.1",
        "schedule.arguments.learning_rate was 0.01 and is 0.1",
        "dtypes.activation was 'float32' and is 'bfloat16'",
        "num_microbatches was 2 and is 1 (my.gin:3)",
        "plan.random_seed was 0 and is 7",
    ):
        assert change in line
    # The record is the last start's; one of an earlier version has none of these.
    assert "dropout_rate was 0.1 and is 0.0" in said_by_a_start_with()[0]
    record = model_dir / "trained_with.json"
    settings = json.loads(record.read_text())
    del settings["may_change"]
    record.write_text(json.dumps(settings))
    assert said_by_a_start_with(model=softer) == []


OTHERS = {
    "another optimizer": AdamWeightDecayConfig(0.0, 0.9, 0.99, 1e-6),
    "one with fewer slots": SgdConfig(),
    "momentum": dataclasses.replace(tiny.ADAFACTOR, beta1=0.9),
    "not factored": dataclasses.replace(tiny.ADAFACTOR, factored=False),
    "factored from another size on": dataclasses.replace(tiny.ADAFACTOR, min_dim_size_to_factor=9),
    "a frozen parameter": dataclasses.replace(tiny.ADAFACTOR, frozen=("token_embedder/embedding",)),
}


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "slots alone"])
@pytest.mark.parametrize("name", OTHERS)
def test_another_optimizer_or_setting_of_it_is_refused(model_dir, name, recorded):
    if not recorded:
        (model_dir / "trained_with.json").unlink()
    with pytest.raises(UserError, match="optimizer") as error:
        check(model_dir, optimizer=OTHERS[name])
    assert "--allow_changed" in (error.value.fix or "")
    check(model_dir, optimizer=OTHERS[name], allow_changed=True)


def test_an_optimizer_without_slots_is_told_from_another_by_the_record(tmp_path):
    trained(tmp_path, optimizer=SgdConfig())
    check(tmp_path, optimizer=SgdConfig())
    with pytest.raises(UserError, match="'SgdConfig' and is 'MomentumConfig'"):
        check(tmp_path, optimizer=MomentumConfig(0.9))


def test_activations_in_another_order_are_refused_with_their_place(model_dir):
    swapped = dataclasses.replace(tiny.MODEL, activations=("linear", "gelu"))
    places = {"model.activations": "my.gin:7"}
    with pytest.raises(UserError, match=r"model\.activations was .*my\.gin:7"):
        check(model_dir, model=swapped, provenance=places)
    check(model_dir, model=swapped, provenance=places, allow_changed=True)


def test_a_setting_of_the_arithmetic_that_came_later_changes_nothing_and_others_do(model_dir):
    record = model_dir / "trained_with.json"
    settings = json.loads(record.read_text())
    del settings["model.arithmetic"]["one_way_position_buckets"]
    record.write_text(json.dumps(settings))
    check(model_dir)
    settings["model.arithmetic"]["cast_before_norm_scale"] ^= True
    record.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"model\.arithmetic\.cast_before_norm_scale was True"):
        check(model_dir)


@pytest.mark.parametrize("backend", ["jax", "mtf"])
@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors", ""])
def test_a_checkpoint_itself_is_no_folder_of_a_run(model_dir, backend, name):
    folder = model_dir / "checkpoint_2"
    if name:  # transformers' and PEFT's
        folder = model_dir / "hf"
        folder.mkdir()
        for each in (name, "config.json", "adapter_config.json"):
            (folder / each).write_text("{}")
    for allow_changed in (False, True):
        with pytest.raises(UserError, match="is a checkpoint itself") as error:
            check(folder, backend, allow_changed)
        assert f"utils.run.init_checkpoint = '{folder}'" in str(error.value)


def test_a_checkpoint_renamed_to_another_step_is_refused(model_dir):
    (model_dir / "checkpoint_2").rename(model_dir / "checkpoint_9")
    with pytest.raises(UserError, match="checkpoint_9 holds step 2") as error:
        check(model_dir)
    assert "checkpoint_2" in (error.value.fix or "")
    check(model_dir, allow_changed=True)


@pytest.mark.parametrize("allow_changed", [False, True])
def test_another_models_checkpoint_is_refused_whatever_is_allowed(model_dir, allow_changed):
    wider = dataclasses.replace(tiny.MODEL, d_ff=24)
    sizes = r"mlp/wi_0/kernel has shape.*It has .* d_ff 12, .*; the model .* d_ff 24, "
    with pytest.raises(UserError, match=sizes):
        check(model_dir, model=wider, allow_changed=allow_changed)
    vocab_size, d_model = tiny.MODEL.vocab_size + 128, 2 * tiny.MODEL.d_model
    for changes, fix in (
        ({"vocab_size": vocab_size}, "Give the vocabulary"),
        ({"d_model": d_model}, "Give the gin files of the model"),
        ({"vocab_size": vocab_size, "d_model": d_model}, "Give the gin files of the model"),
    ):
        model = dataclasses.replace(tiny.MODEL, **changes)
        with pytest.raises(UserError, match="embedding has shape") as error:
            check(model_dir, model=model, allow_changed=allow_changed)
        assert str(error.value.fix).startswith(fix)


@pytest.mark.parametrize("allow_changed", [False, True])
def test_mesh_tensorflow_does_not_start_over_beside_jaxs_checkpoints(model_dir, allow_changed):
    with pytest.raises(
        UserError, match="JAX stack, the latest of step 2.*initialized parameters"
    ) as error:
        check(model_dir, "mtf", allow_changed=allow_changed)
    assert f"t0repro convert {model_dir} NEW_DIR --to mtf" in (error.value.fix or "")


def test_parameters_without_slots_are_gone_on_from(model_dir):
    tree = load_tree(model_dir / "checkpoint_2")
    shutil.rmtree(model_dir / "checkpoint_2")
    bare = {name: x for name, x in tree.items() if "param_states" not in name}
    save_tree(model_dir / "checkpoint_2", {name: np.asarray(x) for name, x in bare.items()})
    check(model_dir)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_record_that_cannot_be_read_is_named(model_dir, text):
    (model_dir / "trained_with.json").write_text(text)
    with pytest.raises(UserError, match="cannot be read") as error:
        check(model_dir)
    assert str(error.value.where).endswith("trained_with.json")


def test_a_folder_without_checkpoints_passes(tmp_path):
    check(tmp_path / "none")
    check(tmp_path, "mtf")


# ---- The command's way in ------------------------------------------------------------------------


def configuration(model_dir, gin_text, allow_changed=False, **changes):
    config = dataclasses.replace(resume_run.config(model_dir, 2, seed=3), **changes)
    data = config.plan.train_data
    assert data is not None
    known = {
        "mode": "train",
        "model_dir": str(model_dir),
        "split": data.split,
        "mixture_or_task_name": data.mixture_or_task_name,
        "batch_size": config.batch_size,
        "sequence_length": config.sequence_length,
        "num_microbatches": config.num_microbatches,
        "provenance": {},
    }
    # What only the checks of a command line read is left out.
    inputs = RunInputs(**{field.name: None for field in dataclasses.fields(RunInputs)} | known)
    return Configuration(inputs, config, gin_text, allow_changed=allow_changed)


def test_a_refused_run_leaves_every_file_as_it_was(tmp_path):
    import t0repro.tasks.demo  # noqa: F401 (registers the task)

    start_configured(configuration(tmp_path, "first"))
    before = contents(tmp_path)
    assert (tmp_path / "operative_config.gin").read_text() == "first"
    config = resume_run.config(tmp_path, 2)
    swapped = dataclasses.replace(config.model, activations=("linear", "gelu"))
    with pytest.raises(UserError, match="activations"):
        start_configured(configuration(tmp_path, "second", model=swapped, train_steps=4))
    assert contents(tmp_path) == before
    start_configured(configuration(tmp_path, "second", True, model=swapped, train_steps=4))
    assert (tmp_path / "operative_config.gin").read_text() == "second"
    assert sorted(resume_run.losses(tmp_path)) == [1, 2, 3, 4]


def test_a_second_training_is_refused_at_once_and_touches_nothing(once, tmp_path):
    model_dir = shutil.copytree(once, tmp_path / "model")
    running = model_dir / ".checkpoint_4.0a1b2c3d.tmp"
    running.mkdir()
    with lock_for_training(model_dir, "jax", tiny.run_config(model_dir, 4)):
        before = contents(model_dir)
        with pytest.raises(UserError, match="Another run holds this folder for training"):
            start_configured(configuration(model_dir, "second"))
        assert contents(model_dir) == before and running.is_dir()
