"""FLAN 2022's mixture over one's own tasks: its names, and the rates that FLAN's own have."""

import json
import re
from pathlib import Path

import pytest
import seqio

from t0repro.errors import UserError
from t0repro.tasks import registry
from t0repro.tasks.flan import CAPS, FLAN_2022, add_flan_2022
from t0repro.tasks.registry import prompted_mixtures
from t0repro.tasks.template_registration import register_templates

VOCABULARY = Path(__file__).resolve().parents[2] / "tasks" / "demo" / "sentencepiece.model"
# Dataset -> rows; the first has more than the cap of its source.
ROWS = {"flan_a": 5_010, "flan_b": 40, "flan_c": 10}
TEMPLATES = """\
dataset: {dataset}
templates:
  {dataset}-1: !Template
    name: ask
    jinja: "{{{{text}}}} ||| {{{{label}}}}"
    answer_choices: no ||| yes
    metadata: !TemplateMetadata
      metrics: [Accuracy]
"""
# What FLAN's own mixtures.py registers, at e9e4ec6e, for two tasks of a source: the rate of a task
# with fewer examples than the cap, and of one with more; and, of its example, each one's share.
RECORDED_CAPS = {
    "flan": ("gigaword", 2_044_370, 30_000),
    "dialog": ("wiki_dialog", 11_264_000, 200_000),
    "dialog-ii": ("wiki_dialog_input_inversion", 11_264_000, 200_000),
}
RECORDED_RATES = {
    "flan2022_submix": {
        "flan2021_submix": 0.4, "t0_submix": 0.32, "niv2_submix": 0.2, "cot_submix": 0.05,
        "dialog_submix": 0.03,
    },
    "flan2021_submix": {"flan_zsopt": 1, "flan_fsopt": 1, "flan_zsnoopt": 1, "flan_fsnoopt": 1},
    "t0_submix": {"t0_zsopt": 1, "t0_fsopt": 1, "t0_zsnoopt": 1, "t0_fsnoopt": 1},
    "niv2_submix": {"niv2_zsopt": 1, "niv2_fsopt": 1},
    "cot_submix": {"cot_zsopt": 1, "cot_fsopt": 1},
    "dialog_submix": {"dialog_zsopt": 1, "dialog_fsopt": 1},
    "cot_zsopt": {"palmflan_cot_zs_opt": 1, "palmflan_cot-ii_zs_opt": 0.3},
    "cot_fsopt": {"palmflan_cot_fs_opt": 1, "palmflan_cot-ii_fs_opt": 0.3},
    "dialog_zsopt": {"palmflan_dialog_zs_opt": 1, "palmflan_dialog-ii_zs_opt": 0.3},
    "dialog_fsopt": {"palmflan_dialog_fs_opt": 1, "palmflan_dialog-ii_fs_opt": 0.3},
    "flan_zsopt": {"palmflan_flan_zs_opt": 1},
    "niv2_fsopt": {"palmflan_niv2_fs_opt": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A task of each of three datasets, with rows."""
    folder = tmp_path_factory.mktemp("flan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("T0REPRO_DATA_DIR", str(folder))
        patch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
        for dataset, count in ROWS.items():
            (folder / dataset / "default").mkdir(parents=True)
            rows = (json.dumps({"text": f"row {at}", "label": "no"}) for at in range(count))
            (folder / dataset / "default" / "train.jsonl").write_text("\n".join(rows) + "\n")
            file = folder / f"{dataset}.yaml"
            file.write_text(TEMPLATES.format(dataset=dataset))
            register_templates(file)
        yield [f"{dataset}_ask" for dataset in ROWS]
    # So that tests do not meet.
    for mine, seqios, ours in (
        (
            f"{FLAN_2022}|palmflan_|.*_submix$|.*_[zf]s(no)?opt$",
            seqio.MixtureRegistry,
            registry._mixtures,
        ),
        ("flan_[abc]_ask", seqio.TaskRegistry, registry._tasks),
    ):
        for name in [name for name in ours if re.match(mine, name)]:
            del ours[name]
            if name in seqios.names():
                seqios.remove(name)


@pytest.fixture(scope="module")
def every_kind(tasks):
    kinds = [
        f"{source}_{setting}"
        for source in CAPS
        for setting in ("zs_opt", "fs_opt", "zs_noopt", "fs_noopt")
        if setting.endswith("_opt") or source in ("flan", "t0")
    ]
    add_flan_2022(dict.fromkeys(kinds, tasks))
    return prompted_mixtures()


@pytest.mark.parametrize("name", RECORDED_RATES)
def test_each_mixture_has_flans_name_and_rates(every_kind, name):
    assert every_kind[name].rates == RECORDED_RATES[name]


@pytest.mark.parametrize("source", RECORDED_CAPS)
def test_a_source_has_flans_cap(source):
    _, examples, rate = RECORDED_CAPS[source]
    assert min(examples, CAPS[source]) == rate


def test_a_task_counts_its_rows_up_to_its_sources_cap(every_kind, tasks):
    counted = [every_kind["palmflan_niv2_zs_opt"].rate(task) for task in tasks]
    assert counted == [5_000, 40, 10]
    assert [every_kind["palmflan_cot_zs_opt"].rate(task) for task in tasks] == [5_010, 40, 10]


def test_the_whole_mixtures_rates_are_the_shares_times_the_tasks_own(every_kind, tasks):
    niv2, others = 0.2 * 10 / 5_050, 0.8 * 10 / 5_060
    assert every_kind[FLAN_2022].rate(tasks[-1]) == pytest.approx(niv2 + others)
    assert sum(every_kind[FLAN_2022].rate(task) for task in tasks) == pytest.approx(1)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"flan_zsopt": ["x"]}, "flan_zs_opt"), ({}, "no tasks"), ({"cot_zs_noopt": ["x"]}, "cot_zs")],
)
def test_what_flan_does_not_have_is_refused_with_what_it_has(given, message):
    with pytest.raises(UserError) as error:
        add_flan_2022(given)
    assert message in f"{error.value} {error.value.fix}"
