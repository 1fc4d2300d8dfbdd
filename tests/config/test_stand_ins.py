"""Mesh TensorFlow's gin files read against recorded signatures: the same run, text and errors."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from t0repro.config.mtf import dialect, stand_ins
from t0repro.config.mtf.parser import MeshInputs, parse
from t0repro.errors import UserError

from . import operative_configs

pytestmark = pytest.mark.mtf

ROOT = Path(__file__).parents[2]
DEMO = ("dataset.gin", "demo/t5.1.1.demo.gin", "learning_rate_schedules/constant_0_001.gin")
PARAMS = (
    "MIXTURE_NAME = 'demo_train'",
    "utils.run.mesh_shape = []",
    "run.train_steps = 20",
    "run.batch_size = ('tokens_per_batch', 512)",
    "run.sequence_length = {'inputs': 64, 'targets': 16}",
)
SIZES = ("num_layers = 2", "d_model = 64", "d_ff = 128", "num_heads = 4", "d_kv = 16")
V3_8 = ("utils.run.mesh_shape = @tpu_mesh_shape()", "utils.tpu_mesh_shape.tpu_topology = 'v3-32'")
SHARDS = "utils.tpu_mesh_shape.model_parallelism = 4"
BY_HAND = ("run.mesh_shape = 'batch:4,model:2'", "run.batch_size = ('tokens_per_replica', 512)")
TWO_WAYS = "run.layout_rules = 'batch:batch,d_ff:model,heads:model,vocab:model'"
# Name -> gin files in place of the demo's model, and bindings.
CASES = {
    "demo": ((), ()),
    "1.1 small": (("models/t5.1.1.small.gin",), ()),
    "1.0, of bi_v1": (("models/bi_v1_small.gin",), SIZES),
    "language model": (("models/lm_v1.gin",), (*SIZES, "run.model_type = 'lm'")),
    "shared towers": ((), ("transformer.make_bitransformer.encoder_name = 'decoder'",)),
    "noam": (("learning_rate_schedules/rsqrt_no_ramp_down.gin",), ()),
    "adam": ((), ("run.optimizer = @optimize.AdamWeightDecayOptimizer",)),
    "microbatches": ((), ("serialize_num_microbatches.tokens_per_microbatch_per_replica = 256",)),
    "slice of a TPU": ((), (*V3_8, SHARDS)),
    "chips of a TPU": ((), (V3_8[0], "utils.tpu_mesh_shape.tpu_topology = '4x4'", SHARDS)),
    "twisted chips": ((), (V3_8[0], "tpu_mesh_shape.tpu_topology = '4x8_twisted'", SHARDS)),
    "mesh": ((), (*BY_HAND, TWO_WAYS)),
    "steps by tokens": ((), ("run.train_steps = @auto_train_steps",)),
    "bfloat16": ((), ("get_variable_dtype.slice_dtype = 'bfloat16'",)),
    "score_eval": (("score_eval.gin",), ("run.eval_checkpoint_step = 'all'",)),
    "beam search": (("eval.gin", "beam_search.gin"), ("Bitransformer.decode.alpha = 0.8",)),
    "one of the layers": ((), ("SelfAttention.shared_kv = True",)),
    "dropouts that differ": ((), ("DenseReluDense.dropout_rate = 0.3",)),
    "scope without effect": ((), ("encodr/DenseReluDense.hidden_size = 32",)),
    "unknown argument": ((), ("SelfAttention.num_head = 4",)),
    "no macro": ((), ("SelfAttention.num_heads = %heads",)),
    "misspelled macro": ((), ("tokens_per_bach = 4",)),
    "text for a number": ((), ("SelfAttention.num_heads = '4'",)),
    "no value": ((), ("SelfAttention.num_heads = four",)),
    "no file": (("models/t5.1.1.smal.gin",), ()),
    "no mesh": ((), ("utils.run.mesh_shape = @tpu_mesh_shape()",)),
    "batch of half a sequence": ((), ("run.batch_size = ('tokens_per_batch', 100)",)),
    "no layers": ((), ("make_layer_stack.num_layers = 0",)),
}  # fmt: skip
# What the stand-ins cannot do, and what the error says of it.
NOT_ON_JAX = {
    "unknown configurable": ((), ("SelfAtention.num_heads = 4",), "run with --backend=mtf"),
    "unknown reference": ((), ("run.optimizer = @optimize.Adam",), "run with --backend=mtf"),
    "a call": ((), ("run.optimizer = @AdafactorOptimizer()",), "run with --backend=mtf"),
    "layer of its own": (
        (), ("decoder/make_layer_stack.layers = [@LocalSelfAttention]",), "LocalSelfAttention (0",
    ),
    "no task": ((), ("MIXTURE_NAME = 'nobodys'",), "MIXTURE_NAME = 'nobodys'"),
    "no shape": ((), ("run.mesh_shape = 'batch'",), "run.mesh_shape is 'batch'"),
    "a TSV file": (
        (), ("run.train_dataset_fn = @tsv_dataset_fn",), "(docs/from_t0.md, A TSV file)",
    ),
    "type of TensorFlow's": (
        (), ("get_variable_dtype.activation_dtype = 'int7'",), "TensorFlow has no such type",
    ),
}  # fmt: skip

INFER = MeshInputs(
    "a_model_dir",
    ("demo/t5.1.1.demo.gin", "infer.gin"),
    (*PARAMS[1:2], *PARAMS[3:], "input_filename = 'lines'", "output_filename = 'texts'"),
)


def inputs_of(files, params, prefix=".") -> MeshInputs:
    return MeshInputs(
        "a_model_dir",
        (*DEMO, *files),
        (*PARAMS, *params),
        location_prefixes=(prefix,),
        module_imports=("t0repro.tasks.demo",),
    )


def told(read) -> dict:
    """What came of reading a configuration, as JSON holds it."""
    try:
        found = read()
        run = found.run
    except UserError as error:
        # The folders searched are more after each parse of a process.
        fix = str(error.fix).partition(" Searched")[0]
        return {"error": [type(error).__name__, error.what, error.where, fix]}
    inputs = {k: repr(v) for k, v in vars(found.inputs).items() if k != "vocabularies"}
    inputs["provenance"] = dict(found.inputs.provenance)
    return {"run": repr(run), "inputs": inputs, "gin": found.gin_text}


def described(arguments: list) -> list[dict]:
    """Each configuration as stand-ins give it, in this process, which has no package after it."""
    results = [told(lambda each=each: dialect.load(inputs_of(*each))) for each in arguments]
    found = {"tensorflow", "mesh_tensorflow", "t5", "seqio", "clu"}.intersection(sys.modules)
    assert not found, found
    return results


def in_another_process(cases: list) -> list[dict]:
    code = (
        f"import json, sys; sys.path.append({str(ROOT)!r});"
        "from tests.config.test_stand_ins import described;"
        "print(json.dumps(described(json.load(sys.stdin))))"
    )
    command = [sys.executable, "-P", "-c", code]
    ran = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def as_loaded(inputs: MeshInputs) -> dict:
    """As it is read with the packages' own configurables."""
    return told(lambda: dialect.load(inputs, with_packages=True))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gin")
    (folder / "import_json.gin").write_text("import json\n")
    for name in ("T5_1_0", "T5_1_1"):
        (folder / f"{name}.gin").write_text(getattr(operative_configs, name))
    return str(folder)


@pytest.fixture(scope="module")
def results(prefix):
    cases = {
        **CASES,
        **{f"released {name}": ((f"{name}.gin",), ()) for name in ("T5_1_0", "T5_1_1")},
    }
    others = [case[:2] for case in NOT_ON_JAX.values()]
    arguments = [[*case, prefix] for case in (*cases.values(), *others)]
    found = in_another_process(arguments)
    return dict(zip((*cases, *NOT_ON_JAX), zip(found, arguments, strict=True), strict=True))


@pytest.mark.parametrize("name", [*CASES, "released T5_1_0", "released T5_1_1"])
def test_the_configuration_or_the_error_is_that_of_the_real_packages(results, name):
    found, arguments = results[name]
    assert found == as_loaded(inputs_of(*arguments))


@pytest.mark.parametrize("name", NOT_ON_JAX)
def test_what_is_not_recorded_is_refused_by_name_and_place(results, name):
    told, _ = results[name]
    assert NOT_ON_JAX[name][2] in " ".join(map(str, told["error"]))
    assert "gin_param" in str(told["error"]) or "command line" in str(told["error"])


def test_a_module_that_a_gin_file_imports_may_import_the_packages(tmp_path, monkeypatch):
    """It registers their own configurables, which the stand-ins hide and then give back."""
    (tmp_path / "my_layers.py").write_text("import t5.models.mesh_transformer\n")
    monkeypatch.syspath_prepend(tmp_path)
    inputs = inputs_of((), ("import my_layers",))
    assert dialect.load(inputs).run == dialect.load(inputs, with_packages=True).run
    assert dialect.load(inputs).run.model.d_model == 128


def test_the_recorded_signatures_are_those_of_the_installed_packages():
    script = runpy.run_path(str(ROOT / "scripts" / "dev" / "mtf_signatures.py"))
    assert stand_ins.read_signatures() == script["record"]()


def test_lines_of_text_without_a_mixture_are_read_with_the_vocabulary_that_is_named(monkeypatch):
    """As for infer and score_from_strings, and for tsv_dataset_fn."""
    # Not at the top: the demo would register its tasks with SeqIO, which the stand-ins avoid.
    from t0repro.tasks.demo.datasets import VOCABULARY

    monkeypatch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
    found = dialect.load(INFER)
    assert found.run.vocabulary == str(VOCABULARY)
    assert [each.vocab_size for each in found.inputs.vocabularies] == [1408, 1408]


def test_a_misspelled_import_is_a_warning_and_one_of_an_older_version_is_not(tmp_path, capsys):
    (tmp_path / "mine.gin").write_text(
        "import t5.data.mixtrues\nimport my_taks\nimport t5.data.sentencepiece_vocabulary\n"
    )
    files = ("models/t5.1.1.small.gin", str(tmp_path / "mine.gin"))
    with stand_ins.register():
        parse(MeshInputs("runs/a", files), with_packages=False)
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == [
        f"warning: {tmp_path}/mine.gin:1: there is no module t5.data.mixtrues, so the import does"
        " nothing; nearest: 't5.data.mixtures'",
        f"warning: {tmp_path}/mine.gin:2: there is no module my_taks, so the import does nothing",
    ]
