"""Turns the calls of T5X's eval and infer into the runs that they describe."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from t0repro.config.checkpoints import RestoreConfig
from t0repro.config.data import ExampleFiles
from t0repro.config.run import EvalRun, InferRun
from t0repro.config.settings import check_settings, read
from t0repro.config.t5x.calls import Call, T5xSource, check_refused
from t0repro.config.t5x.gin_files import Parsed
from t0repro.config.t5x.layout import read_layout
from t0repro.config.t5x.model import (
    read_converter,
    read_decoding,
    read_dtypes,
    read_model,
    read_vocabularies,
)
from t0repro.errors import UserError


def read_eval_run(parsed: Parsed) -> EvalRun:
    """The evaluation that a program describes.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    program = parsed.program
    check_refused(program)
    if program["inference_evaluator_cls"] is None:
        program.refuse(
            "inference_evaluator_cls", "an evaluation needs an evaluator.", "Bind @seqio.Evaluator."
        )
    source = T5xSource(program, {})
    plan = read(EvalRun, source, source.places, "", **_read_parts(program, source))
    check_settings(plan, plan.provenance)
    return plan


def read_infer_run(parsed: Parsed) -> InferRun:
    """The inference that a program describes.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    program = parsed.program
    check_refused(program)
    _check_infer(program)
    source = T5xSource(program, {})
    data, files = program["dataset_cfg"], None
    task = data["mixture_or_task_name"]
    if isinstance(task, Call) and task.configurable == "create_task_from_tfexample_file":
        files = _read_files(task, source)
        # The rest of the plan reads the task's name.
        data = dataclasses.replace(
            data, arguments={**data.arguments, "mixture_or_task_name": files.name}
        )
    if data["task_feature_lengths"] is None:
        data.refuse(
            "task_feature_lengths",
            "inference needs a length for each feature.",
            "Set TASK_FEATURE_LENGTHS.",
        )
    common = _read_parts(program, source, data)
    plan = read(InferRun, source, source.places, "", files=files, **common)
    check_settings(plan, plan.provenance)
    lacks_inputs = plan.data.converter == "decoder" and "inputs" not in data["task_feature_lengths"]
    if lacks_inputs and (plan.mode != "score" or plan.model.input_full_attention):
        data.refuse(
            "task_feature_lengths",
            "without a length for inputs, examples are targets alone.",
            "Give a length for inputs in TASK_FEATURE_LENGTHS.",
        )
    return plan


def _check_infer(program: Call) -> None:
    if program["shard_id"] >= program["num_shards"]:
        places = program.places
        raise UserError(
            f"infer.shard_id = {program['shard_id']}: the {program['num_shards']} shards are"
            " numbered from 0.",
            where=f"{places.get('shard_id')}; {places.get('num_shards')}",
            fix="Choose a shard below infer.num_shards.",
        )
    restore = program["restore_checkpoint_cfg"]
    is_path = isinstance(restore["path"], str) and restore["path"]
    for name, is_one in (("mode", restore["mode"] != "all"), ("path", is_path)):
        if not is_one:
            fix = "Bind 'specific' or 'latest' and one path."
            restore.refuse(name, "an inference takes one checkpoint.", fix)
    written = program["write_fn"]
    if written is not None and written["include_all_inputs"]:
        if written["input_fields_to_include"] is not None:
            why = "include_all_inputs writes all of them."
            written.refuse("input_fields_to_include", why, "Bind one of the two.")


def _read_parts(program: Call, source: T5xSource, data: Call | None = None) -> dict[str, Any]:
    """The parts that evaluation and inference share."""
    model: Call = program["model"]
    restore_call: Call = program["restore_checkpoint_cfg"]
    examples: Call = data or program["dataset_cfg"]
    if examples["pack"]:
        examples.refuse("pack", "outputs belong to single examples.", "Bind False.")
    restore: RestoreConfig | None = source.build(restore_call, "restore.")
    if restore is None:
        restore_call.refuse("path", "no checkpoint is given.", "Set CHECKPOINT_PATH.")
    if restore.adapter is not None and (restore.mode == "all" or isinstance(restore.path, tuple)):
        restore_call.refuse(
            "adapter",
            "an adapter has one base, and several checkpoints are chosen.",
            "Bind 'specific' or 'latest' and the base's path. To evaluate all checkpoints of a run"
            " that trains an adapter, bind its folder as the path, and no adapter.",
        )
    inputs, outputs = read_vocabularies(model, source)
    read_data = source.build(examples, "data.")
    return {
        "model": read_model(model, source),
        "user_model": model.user_class,
        # No parameters are saved, so no dtype is given.
        "dtypes": read_dtypes(model, source, None),
        "data": dataclasses.replace(read_data, converter=read_converter(model)),
        "restore": restore,
        "decoding": read_decoding(model, source, "decoding."),
        "input_vocabulary": inputs,
        "output_vocabulary": outputs,
        "layout": read_layout(program["partitioner"]),
        "provenance": source.places,
    }


def _read_files(task: Call, source: T5xSource) -> ExampleFiles:
    paths = [task["paths"]] if isinstance(task["paths"], str) else list(task["paths"])
    # Build the name as T5X does, so that its results' files can be found again.
    keys = [task["inputs_key"], task["targets_key"] or ""]
    digest = hashlib.md5(":".join(paths + keys).encode()).hexdigest()[:10]
    features = {
        name: (source.build(feature["vocabulary"], ""), feature["add_eos"])
        for name, feature in task["features"].items()
    }
    name = f"infer_{task['task_id'] or digest}"
    return read(
        ExampleFiles,
        source.below(task),
        source.places,
        "files.",
        name=name,
        paths=tuple(paths),
        features=features,
    )
