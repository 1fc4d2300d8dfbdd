"""Prints the table of docs/what_fits.md: memory by model and mode, from released shapes.

.venv/bin/python -P scripts/bench/what_fits.py
"""

from t0repro.converters.released import find, needs_of

# One of each size; the LM-adapted T5 1.1, T0 and Flan-T5 have the shapes of T5 1.1.
NAMES = {
    "T5 1.1 small": "t5.1.1.lm100k.small",
    "T5 1.1 base": "t5.1.1.lm100k.base",
    "T5 1.1 large": "t5.1.1.lm100k.large",
    "T5 1.1 XL (T0-3B)": "t5.1.1.lm100k.xl",
    "T5 1.1 XXL (T0, 11B)": "t5.1.1.lm100k.xxl",
}


def table() -> str:
    """The Markdown table."""
    rows = ["| model | parameters | evaluation, GB | training, GB | a checkpoint, GB |",
            "|---|---|---|---|---|"]  # fmt: skip
    for title, name in NAMES.items():
        needs = needs_of(find(name))
        gigabytes = [needs.evaluation, needs.training, needs.training_disk]
        shown = " | ".join(f"{count / 1e9:.2f}" for count in gigabytes)
        rows.append(f"| {title} | {needs.parameters:,} | {shown} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
