"""Few-shot training on T0's held-out datasets: a mixture for each dataset and seed, as in T-Few.

    few_shot_super_glue_rte_32_seed_42      32 rows of RTE's training split, each prompt that poses
                                            the dataset's original task
    few_shot_anli_r1_32_seed_0              of ANLI's first round

A seed samples the same rows as in T-Few (t0repro.tasks.rows.choose_rows), from rows in the order of
`datasets` 1.12. T-Few has 32 shots of RTE, CB, COPA, WiC and WSC, so these mixtures are its own
splits. Of its 50 shots of ANLI and WinoGrande, the mixtures have the first 32; its 20 shots of
HellaSwag are among the 32. T-Few samples Story Cloze from the validation split, on which T0 is
evaluated, so there is no mixture of it here.

Source: Liu et al. 2022, https://arxiv.org/abs/2205.05638; r-three/t-few, data/few_shot and
src/data/dataset_readers.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from t0repro.tasks.catalog import catalog, rounds_of, t0_datasets
from t0repro.tasks.registration import add_mixture, add_prompted_task
from t0repro.tasks.source import Split
from t0repro.tasks.templates import load_template, task_name, template_names

SHOTS = 32
SEEDS = (0, 1, 32, 42, 1024)
"""The seeds of the paper's five runs (bin/few-shot-pretrained-3b-100k.sh)."""


def register_few_shot(
    dataset: str, subset: str | None, *, shots: int = SHOTS, seeds: Iterable[int] = SEEDS
) -> list[str]:
    """Registers a dataset's tasks on `shots` training rows, and a mixture of them for each seed.

    Args:
      dataset: The Hugging Face name.
      subset: The configuration, or None.
      shots: Rows of each mixture.
      seeds: Seeds with which they are sampled.

    Returns:
      The mixtures' names; ANLI has one for each round and seed.
    """
    rounds = rounds_of(dataset) or {"": {"train": "train"}}
    # With the prompts that T-Few trains on; each has an equal share of the examples.
    templates = [
        name
        for name in template_names(dataset, subset)
        if load_template(dataset, subset, name).metadata.original_task
    ]
    mixtures = []
    for round_, splits in rounds.items():
        for seed in seeds:
            drawn = f"{round_}_{shots}_seed_{seed}"
            tasks = [
                add_prompted_task(
                    dataset,
                    subset,
                    template,
                    {"train": Split(splits["train"], shots, seed)},
                    name=f"few_shot_{task_name(dataset, subset, template)}{drawn}",
                ).name
                for template in templates
            ]
            mixtures.append(f"few_shot_{'_'.join(filter(None, (dataset, subset)))}{drawn}")
            add_mixture(mixtures[-1], dict.fromkeys(tasks, 1.0))
    return mixtures


def register_held_out() -> None:
    """Registers the mixtures of all of T0's held-out datasets with a training split."""
    for entry in t0_datasets():
        splits = catalog()[entry.dataset, entry.subset].splits
        if entry.evaluate == "BASE" and any(name.startswith("train") for name in splits):
            register_few_shot(entry.dataset, entry.subset)


register_held_out()
