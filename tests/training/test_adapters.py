"""Adapters in training: the base stays as it is; runs stop, go on and are refused."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import flax.traverse_util
import jax
import numpy as np
import pytest

from t0repro.adapters import ia3, join_adapter, lora
from t0repro.config.checkpoints import RestoreConfig
from t0repro.config.combinations import check_combinations
from t0repro.config.model import Layout
from t0repro.config.optimizer import AdamWeightDecayConfig
from t0repro.config.run import TerminateOnNanConfig
from t0repro.converters import finding, sources
from t0repro.converters.adapter_files import (
    AdapterNote,
    AdapterReader,
)
from t0repro.converters.convert import convert
from t0repro.converters.restoring import open_start
from t0repro.errors import UserError
from t0repro.evaluation.opened import attach_adapter, open_adapter_at, open_checkpoint
from t0repro.model.layers import Dense
from t0repro.model.t5 import T5, initial_adapter, initial_parameters
from t0repro.partitioning import memory
from t0repro.runs.train import train
from t0repro.training.bad_update import replay
from t0repro.training.checkpoints import checkpoint_path, save_tree
from t0repro.training.model_dir import lock_for_training
from t0repro.training.train_state import to_flat_tree

from ..helpers import tiny_models as tiny

DEEP = dataclasses.replace(
    tiny.MODEL, num_encoder_layers=3, num_decoder_layers=3, dropout_rate=0.1, scan_layers=True
)
LORA, IA3 = lora(rank=2, alpha=4.0, dropout=0.1), ia3()
ADAPTERS = {
    "lora": LORA,
    "lora, bfloat16": lora(rank=2, base_dtype="bfloat16"),
    "ia3": IA3,
    "decoder alone": lora(rank=2, targets=r"decoder/.*/query/kernel"),
    "one layer": lora(
        rank=2, targets=[r"decoder/layers_1/.*/(key|out)/kernel", r".*/mlp/wo/kernel"]
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint of the base."""
    return saved(tmp_path_factory.mktemp("base"), 0)


def saved(folder, seed, model=DEEP):
    params = initial_parameters(T5(model, tiny.FLOAT32), jax.random.key(seed))
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    tree = {f"target/{name}": np.asarray(value) for name, value in flat.items()}
    save_tree(folder / "checkpoint_7", {**tree, "state/step": np.int32(7)})
    return folder / "checkpoint_7"


def config_of(model_dir, base, adapter, steps=4, model=DEEP, **changes):
    restore = RestoreConfig(str(base), "specific", None, (), False, False, "")
    plan = dataclasses.replace(tiny.mesh_plan(save_checkpoints_steps=2), restore=restore)
    return tiny.run_config(
        model_dir, steps, **{"model": model.with_adapter(adapter), "plan": plan, **changes}
    )


def run(config, batches=None, allow_changed=False):
    """Trains as the command does, on the same batches by step."""
    with lock_for_training(config.model_dir, "jax", config, allow_changed=allow_changed) as check:
        folder = checkpoint_path(config.model_dir, 2)
        skipped = 2 if folder.is_dir() else 0
        return to_flat_tree(
            train(
                config,
                batches or tiny.batches(config.train_steps)[skipped:],
                restore_from=lambda fresh: open_start(config, fresh),
                check=check,
                seed=3,
            )
        )


def losses(model_dir):
    lines = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in lines if "loss" in row}


# ---- Arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [*((name, tiny.FLOAT32) for name in ADAPTERS), ("lora", tiny.BFLOAT16)],
    ids=[*ADAPTERS, "lora, activations in bfloat16"],
)
def test_a_new_adapter_leaves_every_logit_bit_equal(name, dtypes):
    adapter = ADAPTERS[name]
    model = T5(DEEP.with_adapter(adapter), dtypes)
    # Scanned and unrolled layers differ by rounding, adapter or not.
    plain = T5(dataclasses.replace(DEEP, scan_layers=model.config.scan_layers), dtypes)
    params = initial_parameters(plain, jax.random.key(0))
    own = initial_adapter(model, jax.random.key(1))
    batch = tiny.batches(1)[0]
    before = plain.apply({"params": params}, batch)
    after = model.apply({"params": join_adapter(params, own, adapter.scale)}, batch)
    np.testing.assert_array_equal(before, after)
    moved = jax.tree.map(lambda x: x + 0.1, own)
    changed = model.apply({"params": join_adapter(params, moved, adapter.scale)}, batch)
    assert np.abs(np.asarray(changed - before)).max() > 1e-3


def test_an_adapter_computes_what_its_papers_formula_says():
    generator = np.random.default_rng(0)
    x, kernel = generator.normal(size=(3, 8)), generator.normal(size=(8, 6))
    a, b = generator.normal(size=(8, 2)), generator.normal(size=(2, 6))
    inputs, outputs = generator.normal(size=8), generator.normal(size=6)
    dense = Dense(6, jax.numpy.float32, jax.nn.initializers.zeros)
    tree = join_adapter({"kernel": kernel}, {"lora_a": a, "lora_b": b}, 1.5)
    found = dense.apply({"params": jax.tree.map(jax.numpy.float32, tree)}, jax.numpy.float32(x))
    np.testing.assert_allclose(found, x @ kernel + 1.5 * (x @ a @ b), rtol=1e-5, atol=1e-5)
    tree = {"kernel": kernel, "ia3_input": inputs, "ia3_output": outputs}
    found = dense.apply({"params": jax.tree.map(jax.numpy.float32, tree)}, jax.numpy.float32(x))
    np.testing.assert_allclose(found, ((x * inputs) @ kernel) * outputs, rtol=1e-5, atol=1e-5)


def test_t_fews_targets_compute_what_pefts_do():
    """The output of wi_1 times a vector is what wo reads times that vector."""
    params = initial_parameters(T5(DEEP, tiny.FLOAT32), jax.random.key(0))
    batch, found = tiny.batches(1)[0], []
    for targets, name in ((".*/mlp/wo/kernel", "wo"), (".*/mlp/wi_1/kernel", "wi_1")):
        model = T5(DEEP.with_adapter(ia3(targets)), tiny.FLOAT32)
        own = initial_adapter(model, jax.random.key(1))
        scale = np.linspace(0.5, 1.5, DEEP.d_ff, dtype="f")
        moved = jax.tree.map(lambda x, by=scale: x * by, own)
        assert name in str(jax.tree_util.tree_structure(own))
        found.append(model.apply({"params": join_adapter(params, moved)}, batch))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-5)
    plain = T5(DEEP, tiny.FLOAT32).apply({"params": params}, batch)
    assert np.abs(np.asarray(plain - found[0])).max() > 1e-2


# ---- Training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lora, bfloat16", "ia3"])
def test_a_run_trains_and_saves_the_adapter_alone_and_goes_on_bit_for_bit(base, name, tmp_path):
    adapter = ADAPTERS[name]
    whole = run(config_of(tmp_path / "whole", base, adapter))
    run(config_of(tmp_path / "parts", base, adapter, 2), tiny.batches(2))
    tree = run(config_of(tmp_path / "parts", base, adapter))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 4
    assert tree.keys() == whole.keys()
    for name, expected in whole.items():
        np.testing.assert_array_equal(tree[name], expected, err_msg=name)
    own = {name for name in whole if name.startswith("target/")}
    ends = {"lora": ("lora_a", "lora_b"), "ia3": ("ia3_input", "ia3_output")}[adapter.kind]
    assert own and all(name.endswith(ends) for name in own)
    slots = {name for name in whole if name.startswith("state/param_states/")}
    assert slots and all(any(end in name for end in ends) for name in slots)
    second = [name for name in own if name.endswith(ends[1])]
    assert all((whole[name] != (adapter.kind == "ia3")).any() for name in second)
    note = AdapterNote.read(checkpoint_path(tmp_path / "parts", 4))
    assert note.adapter == adapter and note.base == str(base)
    assert note.digest == open_checkpoint(str(base), None, "float32").digest


def test_lora_whose_updates_are_scaled_by_its_zeros_is_warned_of(base, tmp_path, capsys):
    def started(adapter, **optimizer):
        config = config_of(tmp_path / str(len(list(tmp_path.iterdir()))), base, adapter, 1)
        changed = dataclasses.replace(config.optimizer, **optimizer)
        run(dataclasses.replace(config, optimizer=changed))
        return capsys.readouterr().err

    said = "multiply_by_parameter_scale = False"
    assert said in started(LORA)
    assert said not in started(LORA, multiply_by_parameter_scale=False)
    assert said not in started(ADAPTERS["ia3"])


def test_gradients_of_an_adapter_are_finite_differences_of_the_loss():
    from t0repro.training.t5_model import T5Model
    from t0repro.training.train_state import TrainState
    from t0repro.training.train_step import accumulate_grads_microbatched, parameters_of

    plain = dataclasses.replace(DEEP, dropout_rate=0.0)
    adapter = dataclasses.replace(LORA, dropout=0.0)
    module = T5(plain.with_adapter(adapter), tiny.FLOAT32)
    model, batch = T5Model(module, measured=False), tiny.batches(1)[0]
    params = initial_parameters(T5(plain, tiny.FLOAT32), jax.random.key(0))
    own = jax.tree.map(lambda x: x + 0.05, initial_adapter(module, jax.random.key(1)))
    state = TrainState(step=jax.numpy.int32(0), params=own, slots=None, frozen=params)
    gradients, _, _ = accumulate_grads_microbatched(model, state, batch, None, 2)
    assert jax.tree.structure(gradients) == jax.tree.structure(own)
    whole, loss_fn = model.whole_batch(batch)

    def loss(step):
        moved = jax.tree.map(lambda x, g: x + step * g, own, gradients)
        return float(loss_fn(parameters_of(model, state.replace(params=moved)), whole, None)[0])

    square = sum(float((g**2).sum()) for g in jax.tree.leaves(gradients))
    step = 1e-2 / square**0.5
    assert (loss(step) - loss(-step)) / (2 * step) == pytest.approx(square, rel=2e-3)


def test_adam_trains_an_adapter_and_goes_on(base, tmp_path):
    adam = AdamWeightDecayConfig(0.9, 0.999, 1e-6, 0.01, ())
    for steps in (2, 4):
        config = config_of(tmp_path, base, LORA, steps, optimizer=adam)
        tree = run(config, tiny.batches(4)[steps - 2 : steps])
    assert int(tree["state/step"]) == 4


def test_a_run_starts_from_another_adapter_as_step_0(base, trained, tmp_path):
    place = trained / "lora, moved"

    def started(base):
        # Without steps to train, the state is what training starts from.
        config = config_of(tmp_path / "run", base, LORA, 0)
        restore = dataclasses.replace(config.plan.restore, adapter=str(tmp_path / "peft"))
        plan = dataclasses.replace(config.plan, restore=restore)
        return run(dataclasses.replace(config, plan=plan))

    convert(place, tmp_path / "peft", "peft")
    tree, own = started(base), AdapterReader(finding.find_checkpoint(place))
    for key in (key for key in own.tensors if key.startswith("target/")):
        np.testing.assert_array_equal(tree[key], own.read(key), err_msg=key)
    assert tree["state/step"] == 0
    assert not any(value.any() for key, value in tree.items() if "param_states" in key)
    with pytest.raises(UserError, match="trained on another base"):
        started(saved(tmp_path / "other", 1))
    with pytest.raises(UserError, match="of another adapter"):
        own.check_continues(IA3, DEEP.shape)
    with pytest.raises(UserError, match=r"alpha / rank = 2, and here it is 1(?s:.*)alpha = 4"):
        own.check_continues(dataclasses.replace(LORA, alpha=2.0), DEEP.shape)


ON_FOUR = """
import sys
from pathlib import Path
from tests.training import test_adapters as t
from t0repro.config.model import Layout
trained, base, folder = map(Path, sys.argv[1:])
opened = t.open_checkpoint(str(base), None, "float32", model_parallelism=2)
for name in ("ia3", "lora"):
    own = t.open_adapter_at(str(trained / f"{name}, moved"))
    t.np.save(folder / f"{name}.npy", t.logits(t.attach_adapter(opened, own)))
plain = t.dataclasses.replace(t.DEEP, dropout_rate=0.0)
for name, layout in (("four", Layout(data=2, model=2)), ("sharded", Layout(fully_sharded=True))):
    t.run(t.config_of(folder / name, base, t.IA3, model=plain, layout=layout))
"""


def logits(opened):
    return np.asarray(opened.model.apply({"params": opened.params}, tiny.batches(1)[0]))


def test_several_devices_train_and_evaluate_the_same_adapter(base, trained, tmp_path):
    plain = dataclasses.replace(DEEP, dropout_rate=0.0)
    run(config_of(tmp_path / "one", base, IA3, model=plain))
    root = Path(__file__).resolve().parents[2]
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ON_FOUR, str(trained), str(base), str(tmp_path)],
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    expected = losses(tmp_path / "one")
    for name in ("four", "sharded"):
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-5)
    opened = open_checkpoint(str(base), None, "float32")
    for name in ("ia3", "lora"):
        expected = logits(attach_adapter(opened, open_adapter_at(str(trained / f"{name}, moved"))))
        np.testing.assert_allclose(np.load(tmp_path / f"{name}.npy"), expected, rtol=0, atol=1e-5)


# ---- Merging -------------------------------------------------------------------------------------


def nested(tree):
    """A checkpoint's parameters as the model takes them."""
    flat = {
        name.removeprefix("target/"): jax.numpy.asarray(np.asarray(value))
        for name, value in tree.items()
        if name.startswith("target/")
    }
    return flax.traverse_util.unflatten_dict(flat, sep="/")


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """A folder of checkpoints by their adapter's name, far from what a new adapter is."""
    folder = tmp_path_factory.mktemp("trained")
    generator = np.random.default_rng(0)
    for name in ("lora", "lora, bfloat16", "ia3"):
        tree = run(config_of(folder / name, base, ADAPTERS[name], 2), tiny.batches(2))
        for key, x in tree.items():
            if key.startswith("target/"):
                tree[key] = x + 0.1 * generator.normal(size=x.shape).astype("f")
        path = checkpoint_path(folder / f"{name}, moved", 2)
        save_tree(path, tree)
        AdapterNote.read(checkpoint_path(folder / name, 2)).write(path)
    return folder


def assert_differ_by_rounding(adapted, model, merged, batch):
    """Logits differ from the merged model's by less than a change of its parameters by a bit."""
    expected = model.apply({"params": merged}, batch)
    moved = model.apply({"params": tiny.neighbors(merged)}, batch)
    np.testing.assert_allclose(adapted, expected, rtol=0, atol=np.abs(moved - expected).max())


@pytest.mark.parametrize("name", ["lora", "lora, bfloat16", "ia3"])
def test_a_merged_models_logits_are_the_adapted_models(base, trained, name):
    place = trained / f"{name}, moved"
    adapter = ADAPTERS[name]
    plain = T5(dataclasses.replace(DEEP, scan_layers=False, dropout_rate=0.0), tiny.FLOAT32)
    frozen = jax.tree.map(
        lambda x: x.astype(adapter.base_dtype).astype("float32"), nested(sources.open_any(base))
    )
    reader = AdapterReader(finding.find_checkpoint(place))
    own = nested({key: reader.read(key) for key in reader.tensors})
    batch = tiny.batches(1)[0]
    adapted = plain.apply({"params": join_adapter(frozen, own, adapter.scale)}, batch)
    before = plain.apply({"params": frozen}, batch)
    assert np.abs(adapted - before).max() > 1e-2 * np.abs(adapted).max()
    assert_differ_by_rounding(adapted, plain, nested(sources.open_any(place)), batch)


@pytest.mark.parametrize("to", ["mtf", "t5x", "hf"])
def test_an_adapters_checkpoint_is_converted_as_a_whole_model(trained, tmp_path, to):
    place = trained / "ia3, moved"
    convert(place, tmp_path / "out", to)
    expected, found = sources.load_any(place), sources.load_any(tmp_path / "out")
    assert expected["state/step"] == 2 and not any("param_states" in key for key in expected)
    for key, value in expected.items():
        if key != "state/step" or to != "hf":
            np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_an_adapters_checkpoint_is_evaluated_as_a_whole_model(base, trained):
    opened = open_checkpoint(str(trained / "lora, moved"), None, "float32")
    assert opened.step == 2
    assert opened.digest != open_checkpoint(str(base), None, "float32").digest


@pytest.mark.parametrize("name", ["lora", "lora, bfloat16", "ia3"])
def test_an_adapter_over_an_opened_base_computes_what_the_merged_model_does(base, trained, name):
    place = trained / f"{name}, moved"
    opened = open_checkpoint(str(base), None, "float32")
    beside = attach_adapter(opened, open_adapter_at(str(place)))
    assert beside.step == 2 and beside.digest != opened.digest
    batch = tiny.batches(1)[0]
    found = beside.model.apply({"params": beside.params}, batch)
    assert_differ_by_rounding(found, opened.model, nested(sources.open_any(place)), batch)
    if name != "lora, bfloat16":
        # The base is not copied.
        kernel = opened.params["encoder"]["layers_0"]["mlp"]["wo"]["kernel"]
        assert beside.params["encoder"]["layers_0"]["mlp"]["wo"]["kernel"] is kernel
    # Named alone, it is opened with its base to the same parameters.
    assert open_checkpoint(str(place), None, "float32").digest == beside.digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["lora", "ia3", "one layer"])
def test_a_new_adapter_changes_no_bit_scored_or_merged(base, name, dtype, tmp_path):
    adapter, place = ADAPTERS[name], checkpoint_path(tmp_path, 0)
    own = initial_adapter(T5(DEEP.with_adapter(adapter), tiny.FLOAT32), jax.random.key(1))
    flat = flax.traverse_util.flatten_dict(own, sep="/")
    tree = {f"target/{path}": np.asarray(value) for path, value in flat.items()}
    save_tree(place, {**tree, "state/step": np.int32(0)})
    opened = open_checkpoint(str(base), None, dtype)
    AdapterNote(adapter, str(base), opened.digest).write(place)
    beside, batch = attach_adapter(opened, open_adapter_at(str(place))), tiny.batches(1)[0]
    logits = [each.model.apply({"params": each.params}, batch) for each in (opened, beside)]
    np.testing.assert_array_equal(*logits)
    before, merged = sources.load_any(base), sources.load_any(place)
    for key in before.keys() - {"state/step"}:
        np.testing.assert_array_equal(merged[key], before[key], err_msg=key)


def test_the_scale_of_an_adapter_is_part_of_its_hash(base, trained):
    opened = open_checkpoint(str(base), None, "float32")
    own = open_adapter_at(str(trained / "lora, moved"))
    digest = attach_adapter(opened, own).digest
    own.note = dataclasses.replace(own.note, adapter=dataclasses.replace(LORA, alpha=2.0))
    assert attach_adapter(opened, own).digest != digest


def test_a_merge_needs_the_base_that_the_adapter_was_trained_on(tmp_path):
    base = saved(tmp_path / "base", 0)
    run(config_of(tmp_path / "run", base, IA3, 2))
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="The base of the adapter in .*checkpoint_2 is not there"):
        sources.open_any(tmp_path / "run")
    other = saved(tmp_path / "base", 1)
    with pytest.raises(UserError, match="trained on another base") as refused:
        sources.open_any(tmp_path / "run")
    assert open_checkpoint(str(other), None, "float32").digest in str(refused.value)


# ---- Refusals ------------------------------------------------------------------------------------


def test_a_target_that_matches_nothing_is_refused_with_the_nearest_names():
    with pytest.raises(UserError) as refused:
        DEEP.with_adapter(lora(rank=2, targets=r"decoder/layers_0/self_attention/qery/kernel"))
    said = str(refused.value)
    assert "matches no kernel" in said and "decoder/layers_0/self_attention/query/kernel" in said


def test_a_rank_above_a_matrix_is_refused_with_its_size():
    with pytest.raises(
        UserError, match=r"rank = 9 is above that of .*query/kernel, which is 8 x 8"
    ):
        DEEP.with_adapter(lora(rank=9))


def test_another_base_is_refused_with_both_hashes(base, tmp_path):
    run(config_of(tmp_path / "run", base, IA3, 2))
    other = saved(tmp_path / "other", 1)
    with pytest.raises(UserError) as refused:
        run(config_of(tmp_path / "run", other, IA3))
    digests = [open_checkpoint(str(path), None, "float32").digest for path in (base, other)]
    assert all(digest in str(refused.value) for digest in digests)


def test_a_folder_holds_an_adapter_or_whole_models_and_not_both(base, tmp_path):
    run(config_of(tmp_path, base, IA3, 2))
    with pytest.raises(UserError, match="checkpoints of an adapter, and the run trains a whole"):
        run(config_of(tmp_path, base, None))
    with pytest.raises(UserError, match="checkpoints of whole models, and the run trains an adap"):
        run(config_of(base.parent, base, IA3))
    with pytest.raises(UserError, match=r"model\.adapter was"):
        run(config_of(tmp_path, base, LORA))
    with pytest.raises(UserError, match="of another adapter"):
        run(config_of(tmp_path, base, LORA), allow_changed=True)


def test_a_run_without_a_base_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing names one"):
        train(config_of(tmp_path, "", IA3, plan=tiny.mesh_plan()), tiny.batches(1), seed=3)


def test_what_an_adapter_cannot_be_trained_beside_is_refused(base, tmp_path):
    config = config_of(tmp_path, base, IA3)
    check_combinations(config)
    frozen = dataclasses.replace(tiny.ADAFACTOR, frozen=("decoder/decoder_norm/scale",))
    with pytest.raises(UserError, match="one optimizer"):
        check_combinations(dataclasses.replace(config, optimizer=frozen))
    for change in (
        {"variable_filter": "decoder"},
        {"assignment_map": (("a", None),)},
        {"fallback_to_scratch": True},
        {"dtype": "bfloat16"},
    ):
        restore = dataclasses.replace(config.plan.restore, **change)
        plan = dataclasses.replace(config.plan, restore=restore)
        with pytest.raises(UserError, match=next(iter(change))):
            check_combinations(dataclasses.replace(config, plan=plan))


# ---- A bad update --------------------------------------------------------------------------------


def test_a_bad_update_of_an_adapter_is_replayed(tmp_path):
    tree = dict(sources.load_any(saved(tmp_path / "base", 0)))
    tree["target/decoder/layers_1/mlp/wo/kernel"][0, 0] = np.inf
    save_tree(tmp_path / "bad" / "checkpoint_7", tree)
    bad = tmp_path / "bad" / "checkpoint_7"
    config = config_of(tmp_path / "run", bad, IA3)
    actions = {"TRAIN": (TerminateOnNanConfig("train", "loss"),)}
    plan = dataclasses.replace(tiny.PLAN, restore=config.plan.restore, actions=actions)
    run(dataclasses.replace(config, plan=plan))
    found = replay(next((tmp_path / "run").glob("bad_update_*")))
    assert found is not None and found.name == "decoder/layers_1/mlp/wo/kernel"


# ---- Memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=list(ADAPTERS))
def test_the_account_of_memory_is_that_of_the_arrays(base, adapter, tmp_path):
    from t0repro.partitioning.devices import choose
    from t0repro.training.rematerialization import step_memory

    from .test_step_memory import held

    config = config_of(tmp_path, base, adapter)
    counted = step_memory(config, *held(config, choose(config.layout, config.model, rows=2)))
    estimated = memory.estimate(config)
    of_base = sum(np.prod(s) for s in DEEP.shape.parameters().values())
    of_base *= 2 if adapter.base_dtype == "bfloat16" else 4
    assert counted.parameters == estimated.parameters == of_base + counted.gradients
    assert counted.gradients == estimated.gradients and 0 < counted.gradients < of_base / 2
    assert counted.slots == estimated.slots
    config = config_of(tmp_path, base, None)
    whole = step_memory(config, *held(config, choose(Layout(), DEEP, rows=2)))
    assert counted.total < whole.total


@pytest.mark.parametrize(
    ("make", "argument", "values"),
    [
        (lora, "rank", (0, True, 2.5, "8", None)),
        (lora, "alpha", (0, -1, True, float("nan"), float("inf"), "8", None, 10**400)),
        (lora, "dropout", (1, -0.1, "0", True, None)),
        (ia3, "targets", (3, None, [3], [], [None])),
        (ia3, "base_dtype", ("float16", None, 32)),
    ],
)
def test_an_argument_of_another_type_or_range_is_refused_by_its_name(make, argument, values):
    for value in values:
        with pytest.raises(UserError, match=f"{argument} is "):
            make(**{argument: value})
