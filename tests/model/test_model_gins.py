"""Every model gin that t5 ships: the JAX model has Mesh TensorFlow's variables, or says why not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import flax.traverse_util
import jax
import pytest

from t0repro.config.mtf import dialect
from t0repro.config.mtf.parser import MeshInputs
from t0repro.config.mtf.refusals import known_bindings
from t0repro.errors import UserError
from t0repro.model.t5 import T5, initial_parameters
from t0repro.parameters import naming
from t0repro.training.optimizers import make_optimizer
from t0repro.training.train_state import flat_slots

from ..helpers.kept import COMPAT

pytestmark = pytest.mark.mtf

SCRIPT = Path(__file__).with_name("mesh_variables.py")
BINDINGS = "include 'defaults.gin'\ninclude 'models/{name}.gin'\nutils.run.mesh_shape = []\n"
# Which layer or option of each model the JAX stack does not have; docs/gin.md lists them.
OTHER_FAMILIES = {
    "bi_bert_base": "learned position embeddings",
    "bi_bert_large": "learned position embeddings",
    "t5.1.n4w10.base": "the encoder layer SelfAttention with num_heads = 12",
    "t5.1.n4w10.large": "the encoder layer SelfAttention with num_heads = 32",
    "t5.1.n4w10.xl": "learned position embeddings",
    "t5.1.th.base": "the encoder layer TalkingHeadsSelfAttention",
    "t5.1.th.large": "the encoder layer TalkingHeadsSelfAttention",
}


def shipped() -> list[str]:
    """The names of all model gins of the installed t5."""
    import importlib.util

    spec = importlib.util.find_spec("t5")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "models" / "gin" / "models"
    return sorted(path.stem for path in folder.glob("*.gin"))


FAMILY = [name for name in shipped() if name not in OTHER_FAMILIES]


def load(name: str, *params: str):
    """The TrainRun of the demo's data with a model gin."""
    inputs = MeshInputs(
        "a_model_dir",
        ("dataset.gin", f"models/{name}.gin"),
        ("MIXTURE_NAME = 'demo_train'", "utils.run.mesh_shape = []", *params),
        module_imports=("t0repro.tasks.demo",),
    )
    return dialect.load(inputs).run


def mesh(folder: Path, vocabulary: int, more: str, slots: bool) -> dict:
    """What Mesh TensorFlow makes of all gins of the family, in one process."""
    job = {
        "out": str(folder / "variables.json"),
        "vocabulary": vocabulary,
        "slots": slots,
        "gins": {name: BINDINGS.format(name=name) + more for name in FAMILY},
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(job)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "variables.json").read_text())


@pytest.fixture(scope="module")
def shallow(once):
    """All gins with two layers, so that a graph takes a second rather than half a minute."""
    vocabulary = load(FAMILY[0]).model.vocab_size
    folder = once(
        "shallow_models",
        lambda folder: mesh(folder, vocabulary, "num_layers = 2\n", slots=True),
        f"{vocabulary} {FAMILY}", Path(__file__), SCRIPT, COMPAT,
    )  # fmt: skip
    return json.loads((folder / "variables.json").read_text())


def names_and_shapes(config) -> tuple[dict, dict]:
    """Mesh TensorFlow's names and shapes of the JAX model's parameters, and of its slots."""
    model, optimizer = T5(config.model, config.dtypes), config.optimizer
    shapes = jax.eval_shape(lambda: initial_parameters(model, jax.random.key(0)))
    names = config.model.mesh_variables()
    of_optimizer = flat_slots(jax.eval_shape(make_optimizer(optimizer).init, shapes))
    parameters, slots = {}, {}
    for path, array in flax.traverse_util.flatten_dict(shapes, sep="/").items():
        parameters[names[path]] = list(array.shape)
        for slot in naming.SLOT_NAMES:
            if (zeros := getattr(of_optimizer[path], slot)) is not None:
                theirs = naming.join_mtf_slot(names[path], naming.slot_to_mtf(slot, array.shape))
                slots[theirs] = list(zeros.shape)
    return parameters, slots


@pytest.mark.parametrize("name", FAMILY)
def test_the_jax_model_has_the_variables_and_slots_that_mesh_tensorflow_makes(shallow, name):
    parameters, slots = names_and_shapes(load(name, "num_layers = 2"))
    assert parameters == shallow[name]["variables"]
    assert slots == shallow[name]["slots"]


@pytest.mark.slow
def test_so_it_has_in_every_layer(tmp_path):
    configs = {name: load(name) for name in FAMILY}
    expected = mesh(tmp_path, configs[FAMILY[0]].model.vocab_size, "", slots=False)
    for name, config in configs.items():
        assert names_and_shapes(config)[0] == expected[name]["variables"], name


def test_everything_that_a_training_graph_consults_is_known_to_the_reader(shallow):
    consulted = {selector for result in shallow.values() for selector in result["consulted"]}
    assert len(consulted) > 20
    assert consulted - set(known_bindings()) == {"gin.macro"}


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_a_model_of_another_family_is_refused_by_layer_and_place(name):
    with pytest.raises(UserError, match=re.escape(OTHER_FAMILIES[name])) as error:
        load(name)
    assert re.search(r"\.gin:\d+", str(error.value.where)) or "position" in OTHER_FAMILIES[name]


def test_the_families_together_are_all_that_t5_ships():
    assert set(OTHER_FAMILIES) <= set(shipped())
    assert all(name.startswith(("t5.1.0", "t5.1.1", "bi_v1", "lm_v1")) for name in FAMILY)
    assert FAMILY


def test_sizes_of_the_largest_model_are_those_of_its_gin():
    model = load("t5.1.1.xxl").model
    assert (model.num_encoder_layers, model.num_decoder_layers) == (24, 24)
    assert (model.d_model, model.d_ff, model.num_heads, model.d_kv) == (4096, 10240, 64, 64)


def test_language_models_have_one_tower_and_their_own_attention():
    plain, full = load("lm_v1").model, load("lm_v1_ifa").model
    assert (plain.model_type, plain.num_encoder_layers) == ("lm", 0)
    assert not plain.input_full_attention and full.input_full_attention
    assert load("lm_v1", "run.model_type = 'delimited_lm'").model.model_type == "delimited_lm"


def test_towers_of_one_name_share_their_parameters():
    assert load("bi_v1_shared").model.shared_towers
    assert not load("bi_v1").model.shared_towers
