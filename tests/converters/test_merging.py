"""`t0repro adapters`: merged checkpoints in every format, and the base back, bit for bit."""

import json
import math
import shutil

import numpy as np
import pytest

from t0repro import storage
from t0repro.adapters import ia3, lora
from t0repro.converters import finding, sources
from t0repro.converters.adapter_files import open_adapter
from t0repro.converters.convert import convert
from t0repro.converters.inspection import inspect_checkpoint
from t0repro.converters.merging import merge, unmerge
from t0repro.converters.model_gin import drop_adapter
from t0repro.errors import UserError
from t0repro.evaluation.opened import attach_adapter, open_adapter_at, open_checkpoint
from t0repro.parameters import naming
from t0repro.storage import buckets

from ..cli.commands import run
from ..helpers import tiny_models as tiny
from .peft_side import MODELS, forget_hash, save_adapter, save_base, tokens

MODEL = MODELS["gated, untied"]
KINDS = {"lora": lora(rank=2, alpha=3.0), "ia3": ia3()}

ADAPTED = """
from t0repro import adapters
# Parameters for t0repro.jax_training:
t0repro.jax_training.adapter = @t0repro.adapters.lora()
t0repro.jax_training.data_shards = 1
train_script.train.adapter = @adapters.lora()
# Parameters for t0repro.adapters.lora:
t0repro.adapters.lora.rank = 2
t0repro.adapters.lora.targets = \\
    ['.*/query/kernel',
     '.*/value/kernel']
adapters.lora.alpha = 3.0
# Parameters for DenseReluDense:
DenseReluDense.activation = ['gelu', 'linear']
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base of ours and for transformers, and its adapters by kind, as runs of ours left them.

    The base has optimizer slots.
    """
    folder = tmp_path_factory.mktemp("made")
    base, hf = save_base(folder, MODEL, slots=True)
    assert any(key.startswith(naming.SLOTS) for key in sources.open_any(base))
    adapters = {}
    for name, adapter in KINDS.items():
        adapters[name] = save_adapter(folder / name, MODEL, adapter, base)
        (folder / name / "operative_config.gin").write_text(ADAPTED)
    return base, hf, adapters


def logits(path, change=lambda params: params) -> np.ndarray:
    opened = open_checkpoint(str(path), None, "float32")
    return np.asarray(opened.model.apply({"params": change(opened.params)}, tokens()))


def assert_same_bits(found, expected):
    found, expected = sources.load_any(found), sources.load_any(expected)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and found[key].tobytes() == value.tobytes(), key


@pytest.mark.parametrize(
    ("to", "kind"), [("mtf", "lora"), ("t5x", "ia3"), ("jax", "lora"), ("hf", "ia3")]
)
def test_a_merged_checkpoint_computes_the_same_and_gives_its_base_back(
    made, to, kind, tmp_path, monkeypatch, capsys
):
    base, _, adapters = made
    own, whole, back = map(str, (adapters[kind], tmp_path / "merged", tmp_path / "back"))
    assert run(monkeypatch, capsys, "adapters", "merge", own, whole, f"--to={to}")[0] == 0
    adapted, before, merged = logits(adapters[kind]), logits(base), logits(whole)
    assert np.abs(adapted - before).max() > 1e-2 * np.abs(adapted).max()
    # A fixed bound would depend on the machine, whose matmuls sum in an order of their own.
    rounding = np.abs(logits(whole, tiny.neighbors) - merged).max()
    np.testing.assert_allclose(merged, adapted, rtol=0, atol=rounding)
    assert run(monkeypatch, capsys, "adapters", "unmerge", whole, back)[0] == 0
    assert_same_bits(back, base)


def test_a_merge_of_another_type_and_vocabulary_gives_its_base_back(made, tmp_path):
    _, hf, adapters = made
    convert(adapters["lora"], tmp_path / "peft", "peft")
    options = {"dtype": "bfloat16", "vocab_size": 256}
    convert(tmp_path / "peft", tmp_path / "merged", "jax", base=hf, **options)
    report = unmerge(tmp_path / "merged", tmp_path / "back")
    assert report.target.format == "hf"
    assert_same_bits(tmp_path / "back", hf)


def test_a_merged_models_gin_file_has_no_adapter(made, tmp_path):
    _, _, adapters = made
    merge(adapters["lora"], tmp_path / "merged", "jax")
    assert (tmp_path / "merged" / "operative_config.gin").read_text() == drop_adapter(ADAPTED)
    left = [line for line in drop_adapter(ADAPTED).splitlines() if line[:1] not in ("#", "")]
    assert left == [
        "from t0repro import adapters",
        "t0repro.jax_training.data_shards = 1",
        "DenseReluDense.activation = ['gelu', 'linear']",
    ]


# The emulators take long for each object, and T5X's format has one for each array.
@pytest.mark.parametrize(
    ("bucket", "to"),
    [
        ("memory", "t5x"),
        pytest.param("gs", "hf", marks=pytest.mark.slow),
        pytest.param("s3", "hf", marks=pytest.mark.slow),
    ],
    indirect=["bucket"],
)
def test_an_adapter_and_its_base_are_merged_and_scored_in_a_bucket(
    made, bucket, to, monkeypatch, capsys
):
    base, _, adapters = made
    at, own = f"{bucket}/base/{base.name}", f"{bucket}/own/{adapters['lora'].name}"
    for place, address in ((base, at), (adapters["lora"], own)):
        storage.put_tree(place, address)
    note = json.loads((adapters["lora"] / "adapter.json").read_text())
    buckets.write(f"{own}/adapter.json", json.dumps({**note, "base": at}).encode())
    for words in (
        ("adapters", "merge", own, f"{bucket}/merged", f"--to={to}"),
        ("adapters", "unmerge", f"{bucket}/merged", f"{bucket}/back"),
        ("convert", own, f"{bucket}/peft", "--to=peft"),
    ):
        code, _, said = run(monkeypatch, capsys, *words)
        assert code == 0, said
    assert_same_bits(f"{bucket}/back", base)
    opened = open_checkpoint(at, None, "float32")
    digests = {
        attach_adapter(opened, open_adapter_at(path)).digest for path in (own, f"{bucket}/peft")
    }
    assert digests == {open_checkpoint(str(adapters["lora"]), None, "float32").digest}


# ---- Refusals ------------------------------------------------------------------------------------


def test_a_whole_model_is_not_merged_nor_unmerged(made, tmp_path):
    base, hf, _ = made
    with pytest.raises(UserError, match="a whole model's, not an adapter's"):
        merge(base, tmp_path / "out", "jax")
    for whole in (base, hf):  # transformers' directory has a record of its conversion
        with pytest.raises(UserError, match="which adapter and base it was merged from"):
            unmerge(whole, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def own(made, tmp_path):
    """A base and an adapter that a test may change, and their merge."""
    base, _ = save_base(tmp_path, MODEL)
    adapter = save_adapter(tmp_path / "own", MODEL, KINDS["ia3"], base)
    merge(adapter, tmp_path / "merged", "jax")
    return base, adapter, tmp_path / "merged"


def test_a_base_that_was_replaced_is_refused_with_both_hashes(own, tmp_path):
    base, adapter, merged = own
    digest = open_checkpoint(str(base), None, "float32").digest
    # PEFT's folder has no hash of its base, but the merged checkpoint has.
    convert(adapter, tmp_path / "peft", "peft")
    forget_hash(tmp_path / "peft")
    merge(tmp_path / "peft", tmp_path / "of_peft", "jax")
    shutil.rmtree(base.parent)
    save_base(tmp_path / "new", MODEL, seed=5)
    shutil.move(tmp_path / "new" / "base", base.parent)
    here = open_checkpoint(str(base), None, "float32").digest
    for whole in (merged, tmp_path / "of_peft"):
        with pytest.raises(UserError, match="another base") as refused:
            unmerge(whole, tmp_path / "back")
        assert digest in str(refused.value) and here in str(refused.value)
    assert not (tmp_path / "back").exists()


def test_an_adapter_and_a_whole_model_do_not_share_a_folder(own, tmp_path):
    _, adapter, merged = own
    convert(adapter, tmp_path / "peft", "peft")
    convert(merged, tmp_path / "hf", "hf")
    for source, folder, to in ((adapter, "hf", "peft"), (merged, "peft", "hf")):
        with pytest.raises(UserError, match="would be mistaken for the other"):
            convert(source, tmp_path / folder, to, force=True)


def test_a_folder_that_is_a_checkpoint_itself_gets_none_by_step_and_the_other_way_round(
    own, tmp_path
):
    base, adapter, merged = own
    convert(merged, tmp_path / "hf", "hf")
    convert(merged, tmp_path / "jax", "jax")
    convert(adapter, tmp_path / "adapter", "adapter")
    into = [("hf", "jax"), ("hf", "mtf"), ("hf", "adapter"), ("jax", "hf"), ("jax", "adapter")]
    for folder, to in (*into, ("adapter", "jax"), ("adapter", "mtf"), ("adapter", "peft")):
        source = adapter if to in ("adapter", "peft") else merged
        with pytest.raises(UserError, match="would be mistaken for the other"):
            convert(source, tmp_path / folder, to, force=True)
    # By step they lie side by side, and the latest stands for all.
    later = tmp_path / "jax" / "checkpoint_900"
    shutil.copytree(finding.find_checkpoint(tmp_path / "jax").path, later)
    said = convert(merged, tmp_path / "jax", "jax", force=True).notes
    assert any(note.startswith(f"The folder stands for its latest step, {later}") for note in said)
    (tmp_path / "jax" / "run_state.json").touch()
    with pytest.raises(UserError, match="A training run keeps its checkpoints in this folder"):
        convert(merged, tmp_path / "jax", "jax", force=True)


def test_an_adapter_is_inspected_as_one(own):
    base, adapter, merged = own
    found = inspect_checkpoint(adapter)
    own_parameters = sum(
        math.prod(each.shape)
        for key, each in open_adapter(finding.find_checkpoint(adapter)).tensors.items()
        if key.startswith("target/")
    )
    assert found.adapter == {
        "kind": "ia3",
        "base": str(base),
        "parameters": own_parameters,
        "slots": False,
    }
    assert own_parameters < found.parameters
    assert inspect_checkpoint(merged).adapter is None


def test_a_damaged_record_of_a_merge_is_refused(own, tmp_path):
    _, _, merged = own
    record = merged / "conversion.json"
    content = json.loads(record.read_text())
    base = content["source"]["base"]
    for source in (None, 3, [], {"base": base}, {"path": "x", "base": "y"}, {"path": "x"}):
        record.write_text(json.dumps({**content, "source": source}))
        with pytest.raises(UserError, match="does not say which adapter and base"):
            unmerge(merged, tmp_path / "back")
    content["source"]["base"]["hash"] = 3
    record.write_text(json.dumps(content))
    with pytest.raises(UserError, match="does not say which adapter and base"):
        unmerge(merged, tmp_path / "back")


def test_an_adapter_that_was_changed_is_refused_with_the_tensor(own, tmp_path):
    _, adapter, merged = own
    note = json.loads((adapter / "adapter.json").read_text())
    note["adapter"]["base_dtype"] = "bfloat16"
    (adapter / "adapter.json").write_text(json.dumps(note))
    with pytest.raises(UserError, match=r"is not the merge of .*: target/.* differs"):
        unmerge(merged, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_base_that_moved_is_named(own, tmp_path):
    base, _, merged = own
    base.parent.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="The base of the adapter in .* is not there"):
        unmerge(merged, tmp_path / "back")
    unmerge(merged, tmp_path / "back", base=tmp_path / "elsewhere")
    assert_same_bits(tmp_path / "back", tmp_path / "elsewhere")
