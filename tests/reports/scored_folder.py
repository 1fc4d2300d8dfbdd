"""Writes the files of an evaluation, as Mesh TensorFlow does, from rows of scores."""


def write_scores(folder, task, scores, right, step=10):
    """`scores` [examples][choices]; `right` the right choice of each example, -1 for none."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(i, j, value) for i, row in enumerate(scores) for j, value in enumerate(row)]
    targets = "".join(f"(({i}, {j}), {j == right[i]}, 1.0, 2)\n" for i, j, _ in pairs)
    (folder / f"{task}_targets").write_text(targets)
    (folder / f"{task}_inputs").write_text("".join(f"input {i}\n" for i, _, _ in pairs))
    values = "".join(f"{value}\n" for _, _, value in pairs)
    (folder / f"{task}_{step}_predictions").write_text(values)
    return folder
