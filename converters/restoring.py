"""What a run takes from a checkpoint that another run or program wrote, in any format; its checks.

Trees are flat and have T5X's names: `target/decoder/...` for parameters, `state/param_states/...`
for slots.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

from t0repro import storage
from t0repro.config.checkpoints import RestoreConfig
from t0repro.config.combinations import check_has_base
from t0repro.config.configuration import RunInputs
from t0repro.config.run import Mode, TrainRun
from t0repro.converters import finding, mtf
from t0repro.converters.model_files import open_configured
from t0repro.converters.own_tokenizer import check_own_tokenizer
from t0repro.converters.tensor_bundle import BundleReader
from t0repro.converters.tensors import CheckpointRef, FlatTree, StoredTree, cast_parameters
from t0repro.errors import UserError, nearest_names, similar_names
from t0repro.parameters import naming
from t0repro.progress import say
from t0repro.words import counted


def open_start(config: TrainRun, fresh: Callable[[], FlatTree]) -> StoredTree | None:
    """A checkpoint that another program wrote into model_dir, or else the plan's checkpoint.

    Args:
      config: A run without a checkpoint of its own.
      fresh: Makes a newly initialized state's tree, for whatever is not restored.

    Returns:
      A flat tree with the model's names; None for initialized parameters.

    Raises:
      UserError: If the checkpoint is missing or damaged, the model is not configured as its
        config.json says, or the plan's rules do not fit it.
    """
    model_dir, rules, model = os.fspath(config.model_dir), config.plan.restore, config.model
    if model.adapter is not None:
        # The base's parameters; checkpoints in model_dir are the adapter's.
        check_has_base(config)
        assert rules is not None and isinstance(rules.path, str)
        return open_configured(finding.find_checkpoint(rules.path), model)
    if storage.is_directory(model_dir) and finding.list_checkpoints(model_dir):
        return open_configured(finding.find_checkpoint(model_dir), model)
    if rules is None:
        return None
    assert isinstance(rules.path, str), "a training run starts from one checkpoint"
    ref = finding.find_checkpoint(rules.path)
    # The shared position bias stays under its name too, which an assignment_map may give.
    tree = open_configured(ref, model, keep_shared=bool(rules.assignment_map))
    if rules.variable_filter is not None:
        place = config.provenance.get("plan.restore.variable_filter")
        return keep_matching(tree, rules.variable_filter, model.mesh_variables(), fresh, place)
    say(f"restore: {ref.path}")
    # Values, not only shapes: entries that the rules do not restore come from here.
    return apply_rules(tree, fresh(), rules, config.provenance.get("plan.restore.path"))


def keep_matching(
    tree: StoredTree,
    pattern: str,
    variables: Mapping[str, str],
    fresh: Callable[[], FlatTree],
    place: str | None = None,
) -> StoredTree:
    """Keeps only the entries of a checkpoint whose names match a pattern.

    Parameters that do not match are those of a new state, slots start at zero, and the step starts
    at 0 unless the pattern matches `global_step`, as in Mesh TensorFlow's tpu_estimator_model_fn.

    Args:
      tree: an init_checkpoint with T5X's names.
      pattern: a regular expression on Mesh TensorFlow's names; "" keeps everything.
      variables: Mesh TensorFlow's name of each of the model's parameters, by path.
      fresh: makes the new state's tree.
      place: where the pattern was set.

    Raises:
      UserError: if the pattern matches nothing.
    """
    if not pattern:
        return dict(tree)
    # Patterns are written for Mesh TensorFlow's names.
    names = _names_in_mtf(tree, variables)
    matches = {key: tree[key] for key, name in names.items() if re.search(pattern, name)}
    if not matches:
        raise UserError(
            f"init_variable_filter {pattern!r} matches no variable.",
            where=place,
            fix=f"Names are for instance {', '.join(list(variables.values())[:3])}.",
        )
    wanted = [key for key, name in names.items() if name]
    report_unmatched(matches, wanted, {key: key for key in matches})
    # Slots and the step need no entry: `from_flat_tree` starts missing ones at zero.
    new = {key: x for key, x in fresh().items() if key.startswith(naming.PARAMETERS)}
    return new | matches


def _names_in_mtf(tree: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    """Mesh TensorFlow's names of a flat tree's entries; "" for entries that the model lacks.

    Args:
      tree: A flat tree, or its shapes.
      variables: Mesh TensorFlow's name of each parameter, by path.
    """

    def mtf_name(key: str) -> str:
        if key == naming.STEP:
            return naming.MTF_STEP
        try:
            path, slot = naming.split_key(key)
        except ValueError:
            return ""
        parameter = tree.get(naming.PARAMETERS + path)
        if path not in variables or parameter is None:
            return ""
        if slot is None:
            return variables[path]
        if len(parameter.shape) < 2 and slot in ("v_row", "v_col"):
            return ""  # an unused slot
        return naming.join_mtf_slot(variables[path], naming.slot_to_mtf(slot, parameter.shape))

    return {key: mtf_name(key) for key in tree}


def apply_rules(
    tree: StoredTree, fresh: FlatTree, rules: RestoreConfig, where: str | None = None
) -> StoredTree:
    """A checkpoint's entries under the names of the model to be trained.

    Args:
      tree: the checkpoint.
      fresh: a new state of the model, for its names and for entries missing in the checkpoint.
      rules: T5X's rules: renaming, what may be missing, rounding.
      where: where they were set.

    Raises:
      UserError: if a rule matches nothing or leads to nothing, or if slots are missing although the
        rules are strict. `from_flat_tree` reports missing parameters by name.
    """
    names = assign_names(fresh, tree, rules.assignment_map)
    result: dict[str, Any] = {new: tree[old] for new, old in names.items() if old is not None}
    scratch = {new for new, old in names.items() if old is None}
    if rules.fallback_to_scratch:
        scratch |= {name for name in fresh if name not in result}
    result |= {name: fresh[name] for name in scratch}
    # T5X writes one entry for a slot that its optimizer does not use.
    wanted = [name for name in fresh if not name.startswith(naming.SLOTS) or fresh[name].size > 1]
    if rules.strict:
        _check_slots(result, [name for name in wanted if name.startswith(naming.SLOTS)], where)
    report_unmatched(tree, wanted, {new: old for new, old in names.items() if old is not None})
    if rules.dtype in (None, "float32"):
        return result
    return cast_parameters(result, rules.dtype)


def report_unmatched(
    tree: Collection[str], wanted: Collection[str], filled: Mapping[str, str]
) -> None:
    """Lists the entries that a partial restore does not fill, and those that it does not use.

    Parameters are listed by name. Slots follow their parameters and are only counted, or not
    mentioned if the checkpoint has none.

    Args:
      tree: names of the checkpoint's entries.
      wanted: names of the model's entries.
      filled: restored entries, name in the model -> name in the checkpoint.
    """
    kinds = {
        "initialized, not restored": [name for name in wanted if name not in filled],
        "in the checkpoint, not used": sorted(set(tree) - set(filled.values())),
    }
    has_slots = any(name.startswith(naming.SLOTS) for name in tree)
    for kind, names in kinds.items():
        parameters = [name for name in names if name.startswith(naming.PARAMETERS)]
        slots = sum(name.startswith(naming.SLOTS) for name in names) if has_slots else 0
        if parameters or slots:
            counts = f"{counted(len(parameters), 'parameter')} and {counted(slots, 'slot')}"
            say(f"restore: {counts} {kind}{': ' if parameters else ''}{', '.join(parameters)}")


def _check_slots(tree: Collection[str], wanted: Sequence[str], where: str | None) -> None:
    """Refuses a checkpoint that has only some of the slots; one without any is accepted."""
    missing = [name for name in wanted if name not in tree]
    if missing and len(missing) < len(wanted):
        raise UserError(
            f"The checkpoint lacks {len(missing)} of {len(wanted)} slots, for instance"
            f" {missing[0]}.",
            where=where,
            fix="Bind the optimizer that trained it; or utils.RestoreCheckpointConfig.strict ="
            " False, to start the missing ones at zero.",
        )


_WHERE = "utils.RestoreCheckpointConfig.assignment_map"
Rules = Sequence[tuple[str, str | None]]


def assign_names(
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
    assigned: dict[str, str | None] = {}
    unused = {pattern for pattern, _ in rules}
    for name in wanted:
        for pattern, replacement in rules:
            # Match the complete name, as T5X does: a pattern that fits only a part matches nothing.
            match = re.fullmatch(pattern, name)
            if match:
                unused.discard(pattern)
                assigned[name] = None if replacement is None else match.expand(replacement)
                break
    if unused:
        raise UserError(
            f"No name of the model matches {' and '.join(repr(each) for each in sorted(unused))}.",
            where=_WHERE,
            fix="A pattern has to match a whole name, for instance"
            f" {(similar_names(min(unused), wanted) or wanted)[0]!r}.",
        )
    absent = sorted({name for name in assigned.values() if name is not None} - set(stored))
    if absent:
        raise UserError(
            f"The checkpoint has no {', '.join(absent[:5])}.",
            where=_WHERE,
            fix=f"Nearest names: {nearest_names(absent[0], stored)}.",
        )
    given_away = set(assigned.values())
    for name in wanted:
        if name not in assigned and name in stored and name not in given_away:
            assigned[name] = name
    return assigned


_EMBEDDINGS = ("shared/embedding", "encoder/embedding", "decoder/embedding")


def check_checkpoints(inputs: RunInputs, *, jax: bool) -> None:
    """Checks the checkpoints that a run will read.

    Args:
      inputs: The run's inputs.
      jax: True for the JAX backend, which reads every format; False for Mesh TensorFlow.

    Raises:
      UserError: If a checkpoint is missing or damaged, its vocabulary does not match, or Mesh
        TensorFlow could not restore it.
    """
    checkpoints = []
    if inputs.mode == "train":
        checkpoints = _checkpoints_to_start_from(inputs, jax=jax)
    elif inputs.mode in get_args(Mode):
        steps = inputs.eval_checkpoint_step
        steps = list(steps) if isinstance(steps, tuple) else steps
        refs = finding.list_checkpoints(inputs.model_dir)
        if not jax and refs and all(ref.format != "mtf" for ref in refs):
            raise _stack_error(refs[-1], "The latest of model_dir", inputs.master_dtype)
        checkpoints = checkpoints_to_evaluate(inputs.model_dir, steps, jax=jax)
    starts = inputs.init_checkpoint if inputs.mode == "train" else None
    folders = [_folder(path) for path in (inputs.model_dir, starts) if path]
    check_own_tokenizer(folders, *(inputs.vocabularies or ()))
    for checkpoint in checkpoints:
        bundle = open_bundle(checkpoint)
        check_vocabulary(checkpoint, inputs.vocabularies, inputs.vocab_divisor)
        if not jax:
            check_master_dtype(checkpoint, bundle, inputs)


def _folder(path: str) -> str:
    """Where the files about the checkpoint at a path are."""
    directory = storage.is_directory(path) and not re.search(r"checkpoint_\d+/?$", path)
    return path if directory else os.path.dirname(path.rstrip("/"))


def checkpoints_to_evaluate(model_dir: str, steps: Any, *, jax: bool) -> list[str]:
    """Returns the Mesh TensorFlow prefixes in model_dir that eval_checkpoint_step selects.

    Empty if JAX will read checkpoints of another format instead, or if `steps` is None: evaluation
    then waits for new checkpoints.

    Raises:
      UserError: If model_dir has no checkpoint, or its latest is unknown.
    """
    if not mtf.mtf_steps(model_dir):
        if jax and any(ref.format != "mtf" for ref in finding.list_checkpoints(model_dir)):
            return []
        if steps is None and os.path.isdir(model_dir):
            return []
        raise UserError(
            f"No checkpoint to evaluate in {model_dir}.",
            where="looked for model.ckpt-<step>.index" + (" and checkpoint_<step>/" if jax else ""),
            fix="Train first, or correct --model_dir.",
        )
    if not jax:
        mtf.check_state_file(model_dir)
    if steps is None:
        return []
    # None if the state file names no latest checkpoint.
    chosen = [path for path in _choose_prefixes(model_dir, steps, jax) if path]
    if not chosen:
        raise UserError(
            f"The latest checkpoint of {model_dir} is not known.",
            where=f"{os.path.join(model_dir, 'checkpoint')}, the file that names it",
            fix='Give the step: --gin_param="eval_checkpoint_step = STEP".',
        )
    return chosen


def _choose_prefixes(model_dir: str, steps: Any, jax: bool) -> list[str | None]:
    """The prefixes that mesh_tensorflow.transformer.utils.get_checkpoint_iterator yields."""
    if steps == -1:
        named = storage.is_file(storage.join(model_dir, mtf.STATE_FILE))
        return [mtf.latest_mtf_prefix(model_dir)] if named or jax else []
    saved = set(mtf.mtf_steps(model_dir))
    if steps != "all":
        asked = [steps] if isinstance(steps, int) else steps
        # A step that is missing stands for the nearest one.
        saved = {min(saved, key=lambda each, step=step: abs(each - step)) for step in asked}
    return [storage.join(model_dir, f"model.ckpt-{step}") for step in sorted(saved)]


def _checkpoints_to_start_from(inputs: RunInputs, *, jax: bool) -> list[str]:
    """The checkpoints that training reads: the latest of model_dir, and init_checkpoint."""
    refs = finding.list_checkpoints(inputs.model_dir)
    chosen = [mtf.latest_mtf_prefix(inputs.model_dir)]
    if not jax:
        mtf.check_state_file(inputs.model_dir)
        if refs and refs[-1].format != "mtf":
            raise _stack_error(refs[-1], "The latest of model_dir", inputs.master_dtype)
    if inputs.init_checkpoint:
        chosen.append(_initial(inputs.init_checkpoint, inputs, jax))
    return [prefix for prefix in chosen if prefix]


def _initial(path: str, inputs: RunInputs, jax: bool) -> str | None:
    """Returns init_checkpoint's Mesh TensorFlow prefix; None if JAX reads it in another format."""
    # A prefix, or a path to nothing: the next check then names what is missing.
    if storage.is_file(f"{path}.index") or not storage.is_directory(path):
        return path
    if jax:
        return None
    # For a directory, Mesh TensorFlow's tf.train.list_variables takes the latest checkpoint.
    if prefix := mtf.latest_mtf_prefix(path):
        mtf.check_state_file(path)
        return prefix
    raise _stack_error(finding.find_checkpoint(path), "init_checkpoint", inputs.master_dtype)


def _stack_error(ref: CheckpointRef, what: str, master_dtype: str) -> UserError:
    """Returns the error for a checkpoint that Mesh TensorFlow would ignore or fail to read."""
    rounded = f" (parameters are rounded to {master_dtype})" if master_dtype != "float32" else ""
    then = "with init_checkpoint = 'OUT'" if what == "init_checkpoint" else "with --model_dir=OUT"
    return UserError(
        f"{what} is a checkpoint of the format {ref.format}; Mesh TensorFlow reads only its own.",
        where=ref.path,
        fix=f"t0repro convert {ref.path} OUT --to mtf --master_dtype {master_dtype}{rounded}, then"
        f" run {then}; or --backend=jax.",
    )


def open_bundle(prefix: str) -> BundleReader:
    """Opens a Mesh TensorFlow checkpoint and checks that its files exist and are not truncated.

    Raises:
      UserError: Naming the index or data file that is missing, damaged or truncated.
    """
    if not storage.is_file(f"{prefix}.index"):
        raise UserError(
            finding.absence(prefix),
            where=prefix,
            fix="Give a path without '.index', e.g. DIR/model.ckpt-1000; with --backend=jax also a"
            " folder that holds a checkpoint of any format.",
        )
    return BundleReader(prefix)


def check_master_dtype(prefix: str, bundle: BundleReader, inputs: RunInputs) -> None:
    """Raises UserError unless the checkpoint's parameters have the run's master dtype.

    Mesh TensorFlow restores into variables of that dtype, and TensorFlow does not cast.
    """
    masters = {
        entry.dtype.name
        for name, entry in bundle.entries.items()
        # Slots are float32 whatever the master dtype, and the step is an integer.
        if naming.split_mtf_slot(name)[1] is None
        and entry.dtype is not None
        and name != naming.MTF_STEP
    }
    if masters <= {inputs.master_dtype}:
        return
    stored = " and ".join(sorted(masters))
    fix = f"t0repro convert {prefix} OUT --to mtf --master_dtype {inputs.master_dtype}."
    # No binding restores parameters of several types.
    if len(masters) == 1:
        fix = f"Add --gin_param=\"utils.get_variable_dtype.master_dtype = '{stored}'\", or {fix}"
    raise UserError(
        f"The checkpoint's parameters are {stored}; this run has masters in {inputs.master_dtype}.",
        where=f"{prefix}; master_dtype: {inputs.provenance.get('master_dtype', 'a default')}",
        fix=fix,
    )


def check_vocabulary(prefix: str, vocabulary: Any, divisor: int) -> None:
    """Raises UserError unless the embedding has as many rows as the padded vocabulary.

    Args:
      prefix: A Mesh TensorFlow checkpoint.
      vocabulary: A SeqIO vocabulary, or a pair of them for inputs and targets.
      divisor: Mesh TensorFlow pads the vocabulary to a multiple of this (vocab_divisor).
    """
    if vocabulary is None:
        return
    inputs, targets = vocabulary if isinstance(vocabulary, tuple) else (vocabulary, vocabulary)
    entries = BundleReader(prefix).entries
    for name in _EMBEDDINGS:
        if name not in entries:
            continue
        used = targets if name.startswith("decoder") else inputs
        # Rounded up to a multiple of vocab_divisor, as Mesh TensorFlow pads it; a stack's axis of
        # layers may precede the rows.
        rows, padded = entries[name].shape[-2], -(-used.vocab_size // divisor) * divisor
        if rows != padded:
            raise UserError(
                f"The vocabulary does not match the checkpoint: {name} has {rows} rows, and "
                f"{used.vocab_size} pieces are padded to {padded}.",
                where=f"{prefix}; {getattr(used, 'sentencepiece_model_file', used)}",
                fix="Use the vocabulary that the checkpoint was trained with (--vocab or "
                "T0REPRO_VOCAB), or a mixture of its features."
                if used.vocab_size > rows
                else f"If it was trained with this vocabulary: t0repro convert {prefix} OUT --to"
                f" mtf --vocab_size {padded}.",
            )
