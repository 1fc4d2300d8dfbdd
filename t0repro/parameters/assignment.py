"""T5X's assignment_map: which entry of a checkpoint fills which entry of a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from t0repro.errors import UserError, nearest_names

WHERE = "utils.RestoreCheckpointConfig.assignment_map"
Rules = Sequence[tuple[str, str | None]]


def assigned_names(
    wanted: Iterable[str], stored: Collection[str], rules: Rules
) -> dict[str, str | None]:
    r"""Maps each entry of a model to the checkpoint's entry that fills it.

    A rule's pattern must match the model's complete name. Its replacement, in which `\1` stands for
    a group, is the checkpoint's name, or None to keep the initialized value. The first matching
    rule decides. A name without a rule takes the entry of the same name, unless a rule assigned
    that entry to another; if there is none, the result omits it.

    Args:
      wanted: names of the model's entries, such as `target/decoder/logits_dense/kernel`.
      stored: names of the checkpoint's entries.
      rules: (pattern, replacement) pairs.

    Raises:
      UserError: if a rule matches nothing, or names an entry that the checkpoint lacks.

    Source: t5x.state_utils.apply_assignment_map.
    """
    wanted = list(wanted)
    found: dict[str, str | None] = {}
    unused = {pattern for pattern, _ in rules}
    for name in wanted:
        for pattern, replacement in rules:
            # Match the complete name, as T5X does: a pattern that fits only a part matches nothing.
            match = re.fullmatch(pattern, name)
            if match:
                unused.discard(pattern)
                found[name] = None if replacement is None else match.expand(replacement)
                break
    if unused:
        raise UserError(
            f"No name of the model matches {' and '.join(repr(each) for each in sorted(unused))}.",
            where=WHERE,
            fix="A pattern has to match a whole name, for instance"
            f" {nearest_names(min(unused), wanted, count=1)}.",
        )
    absent = sorted({name for name in found.values() if name is not None} - set(stored))
    if absent:
        raise UserError(
            f"The checkpoint has no {', '.join(absent[:5])}.",
            where=WHERE,
            fix=f"Nearest names: {nearest_names(absent[0], stored)}.",
        )
    given_away = set(found.values())
    for name in wanted:
        if name not in found and name in stored and name not in given_away:
            found[name] = name
    return found
