"""Turns T5X's eval and infer programs into EvalPlan and InferPlan."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from t0repro.config import ranges
from t0repro.config.decoding import DecodingPlan
from t0repro.config.inference_plan import EvalPlan, ExampleFiles, InferMode, InferPlan
from t0repro.config.t5x import data, modules, programs, records
from t0repro.config.t5x import model as t5x_model
from t0repro.config.t5x.gin_files import Parsed, Places, check_summary, provenance
from t0repro.config.t5x.model import layout_of
from t0repro.errors import UserError

_OWN_CODE = {
    "train_state_initializer_cls": "this function of the run cannot be replaced.",
    "fallback_init_rng": "a model that is evaluated has all of its parameters in the checkpoint.",
}
_EVAL_CODE = _OWN_CODE | {
    "training_evaluator_cls": "the loss is evaluated in training (train_eval).",
    "train_eval_get_dataset_fn": "the loss is evaluated in training (train_eval).",
}
_INFER_CODE = _OWN_CODE | {
    "merge_fn": "chunks are put one after the other.",
}
_MODES = ("predict", "score", "predict_with_aux")


def eval_plan(parsed: Parsed) -> EvalPlan:
    """The evaluation that a program describes.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    program, places = parsed.program, Places.of(parsed.values)
    assert isinstance(program, programs.EvalProgram)
    places.check_unset(program, "evaluate", _EVAL_CODE)
    check_summary(program, "evaluate", places)
    evaluator = data.evaluator_config(program.inference_evaluator_cls, places)
    if evaluator is None:
        raise places.refused(
            "evaluate.inference_evaluator_cls",
            None,
            "an evaluation needs an evaluator.",
            "Bind @seqio.Evaluator.",
        )
    plan = EvalPlan(evaluator=evaluator, **_common(program, program.dataset_cfg, places))
    ranges.check(plan, _provenance(program, places))
    return plan


def infer_plan(parsed: Parsed) -> InferPlan:
    """The inference that a program describes.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    program, places = parsed.program, Places.of(parsed.values)
    assert isinstance(program, programs.InferProgram)
    places.check_unset(program, "infer", _INFER_CODE)
    check_summary(program, "infer", places)
    _check_infer(program, places)
    record, files = program.dataset_cfg, None
    if isinstance(record.mixture_or_task_name, programs.TfExampleTask):
        files = _files(record.mixture_or_task_name, places)
        # The record is frozen, and the rest of the plan reads the task's name.
        record = dataclasses.replace(record, mixture_or_task_name=files.name)
    if record.task_feature_lengths is None:
        raise places.refused(
            "utils.DatasetConfig.task_feature_lengths",
            None,
            "inference needs a length for each feature.",
            "Set TASK_FEATURE_LENGTHS.",
        )
    written = _written(program, places)
    written_fields = written.input_fields_to_include
    mode: InferMode = program.mode  # pyright: ignore[reportAssignmentType]
    plan = InferPlan(
        mode=mode,
        checkpoint_period=program.checkpoint_period,
        shard_id=program.shard_id,
        num_shards=program.num_shards,
        merge=program.merge_chunked_results,
        files=files,
        all_inputs=written.include_all_inputs,
        input_fields=None if written_fields is None else tuple(written_fields),
        output_ids=written.output_ids,
        **_common(program, record, places),
    )
    ranges.check(plan, _provenance(program, places))
    return plan


def _check_infer(program: programs.InferProgram, places: Places) -> None:
    if program.mode not in _MODES:
        raise places.refused(
            "infer.mode", program.mode, "there is no such mode.", f"Bind one of {_MODES}."
        )
    if program.shard_id >= program.num_shards:
        raise UserError(
            f"infer.shard_id = {program.shard_id}: the {program.num_shards} shards are numbered"
            " from 0.",
            where=f"{places.place('infer.shard_id')}; {places.place('infer.num_shards')}",
            fix="Choose a shard below infer.num_shards.",
        )
    restore = program.restore_checkpoint_cfg
    for name, value, is_one in (
        ("mode", restore.mode, restore.mode != "all"),
        ("path", restore.path, isinstance(restore.path, str) and restore.path),
    ):
        if not is_one:
            raise places.refused(
                f"utils.RestoreCheckpointConfig.{name}",
                value,
                "an inference takes one checkpoint.",
                "Bind 'specific' or 'latest' and one path.",
            )


def _written(program: programs.InferProgram, places: Places) -> programs.WriteInferences:
    """The contents of each line of the results."""
    written = program.write_fn
    if written is None:
        written = programs.WriteInferences()
    if not isinstance(written, programs.WriteInferences):
        raise places.refused(
            "infer.write_fn", written, "results are JSON lines in T5X's form.", "Leave it out."
        )
    fields = written.input_fields_to_include
    if written.include_all_inputs and fields is not None:
        raise places.refused(
            "infer.write_inferences_to_file.input_fields_to_include",
            list(fields),
            "include_all_inputs writes all of them.",
            "Bind one of the two.",
        )
    return written


def _common(program: Any, record: records.DatasetConfig, places: Places) -> dict[str, Any]:
    if record.pack:
        raise places.refused(
            "utils.DatasetConfig.pack", True, "outputs belong to single examples.", "Bind False."
        )
    restore = data.restore_config(program.restore_checkpoint_cfg, places)
    if restore is None:
        raise places.refused(
            "utils.RestoreCheckpointConfig.path",
            program.restore_checkpoint_cfg.path,
            "no checkpoint is given.",
            "Set CHECKPOINT_PATH.",
        )
    if restore.adapter is not None and (restore.mode == "all" or isinstance(restore.path, tuple)):
        raise places.refused(
            "utils.RestoreCheckpointConfig.adapter",
            restore.adapter,
            "an adapter has one base, and several checkpoints are chosen.",
            "Bind 'specific' or 'latest' and the base's path. To evaluate all checkpoints of a run"
            " that trains an adapter, bind its folder as the path, and no adapter.",
        )
    return {
        "model": t5x_model.model_config(program.model, places),
        "user_model": modules.user_class(program.model, places),
        # No parameters are saved, so no dtype is given.
        "dtypes": t5x_model.dtypes(program.model, places, None),
        "data": data.dataset_config(record, "", places),
        "restore": restore,
        "decoding": decoding_plan(program.model, places),
        "input_vocabulary": program.model.input_vocabulary,
        "output_vocabulary": program.model.output_vocabulary,
        "output_dir": program.output_dir,
        "layout": layout_of(program.partitioner, places),
    }


def _provenance(program: Any, places: Places) -> dict[str, str]:
    name = "infer" if isinstance(program, programs.InferProgram) else "evaluate"
    names = t5x_model.model_fields() | data.data_fields("data") | data.restore_fields("restore")
    names |= data.evaluator_fields("evaluator") | decoding_fields("decoding", program.model)
    names |= {
        "output_dir": f"{name}.output_dir",
        "layout": "partitioning.PjitPartitioner.num_partitions",
        "mode": "infer.mode",
        "checkpoint_period": "infer.checkpoint_period",
        "shard_id": "infer.shard_id",
        "num_shards": "infer.num_shards",
        "merge": "infer.merge_chunked_results",
    }
    return provenance(places, names)


# ---- Decoding ------------------------------------------------------------------------------------

_DECODE = "models.EncoderDecoderModel.predict_batch_with_aux"
_METHODS = {records.BeamSearch: "beam_search", records.TemperatureSample: "temperature_sample"}


def decoding_plan(model: records.EncoderDecoderModel, places: Places) -> DecodingPlan:
    """The decoding options in a model's record.

    Raises:
      UserError: For an option that is not supported here, with its place.
    """
    found = _decoding_options(model)
    if not found:
        raise places.refused(
            "models.EncoderDecoderModel.decode_fn",
            model.decode_fn,
            "outputs are found by beam search or by sampling.",
            "Bind @decoding.beam_search or @decoding.temperature_sample.",
        )
    options: dict[str, Any] = {key: value for key, (value, _) in found.items()}
    method = _METHODS[type(model.decode_fn or records.BeamSearch())]
    _apply_hard_limit(options)
    known = {field.name for field in dataclasses.fields(DecodingPlan)}
    for key, value in options.items():
        if key not in known:
            raise places.refused(
                found[key][1],
                {key: value},
                f"decoding.{method} has no argument {key} here.",
                f"Known: {', '.join(sorted(known))}.",
            )
    # T5X raises for this too, but only once it decodes.
    if method == "temperature_sample" and options["topk"] and options["topp"]:
        raise places.refused(
            found["topp"][1],
            options["topp"],
            f"at most one of topk ({options['topk']}) and topp may be other than 0.",
            "Bind decoding.temperature_sample.topk = 0.",
        )
    return DecodingPlan(
        method=method,  # pyright: ignore[reportArgumentType]
        return_all_decodes=model.decoding.return_all_decodes,
        prompt_with_targets=model.decoding.prompt_with_targets,
        **{key: value for key, value in options.items() if key in known},
    )


def decoding_fields(prefix: str, model: records.EncoderDecoderModel) -> dict[str, str]:
    """Fields of a DecodingPlan: the argument that decides each option."""
    options = _decoding_options(model)
    return {f"{prefix}.{field}": name for field, (_, name) in options.items()} | {
        f"{prefix}.return_all_decodes": f"{_DECODE}.return_all_decodes",
        f"{prefix}.prompt_with_targets": f"{_DECODE}.prompt_with_targets",
    }


def _decoding_options(model: records.EncoderDecoderModel) -> Mapping[str, tuple[Any, str]]:
    """The options of a model's decoding function, each with the argument that decides it."""
    # T5X's default is beam_search.
    function = model.decode_fn if model.decode_fn is not None else records.BeamSearch()
    if type(function) not in _METHODS:
        return {}
    name = f"decoding.{_METHODS[type(function)]}"
    found = {key: (value, f"{name}.{key}") for key, value in vars(function).items()}
    # T5X passes these as arguments, so they override what gin binds for the function.
    for given, argument in (
        (model.default_decoder_params, "models.EncoderDecoderModel.default_decoder_params"),
        (model.decoding.decoder_params, f"{_DECODE}.decoder_params"),
    ):
        found |= {key: (value, argument) for key, value in (given or {}).items()}
    # T5X passes its own number of decodes too, whatever gin binds.
    return found | {"num_decodes": (model.decoding.num_decodes, f"{_DECODE}.num_decodes")}


def _apply_hard_limit(options: dict[str, Any]) -> None:
    # T5X takes the lower of the two, so one number is enough.
    limit = options.pop("max_decode_steps_hard_limit", None)
    steps = options.get("max_decode_steps")
    if limit and steps is not None:
        options["max_decode_steps"] = min(steps, limit)


# ---- Examples in files ---------------------------------------------------------------------------


def _files(task: programs.TfExampleTask, places: Places) -> ExampleFiles:
    name = "create_task_from_tfexample_file"
    if task.file_type not in ("tfrecord", "jsonl"):
        raise places.refused(
            f"{name}.file_type",
            task.file_type,
            "examples are read from TFRecord files and from JSON Lines.",
            "Set TF_EXAMPLE_FILE_TYPE to 'tfrecord' or 'jsonl'.",
        )
    for feature in task.features.values():
        why = "a feature of examples is a sequence of tokens."
        places.check_unset(feature, "seqio.Feature", {"dtype": why, "rank": why, "required": why})
    paths = [task.paths] if isinstance(task.paths, str) else list(task.paths)
    keys = [task.inputs_key, task.targets_key or ""]
    # Build the name as T5X does, so that its results' files can be found again.
    digest = hashlib.md5(":".join(paths + keys).encode()).hexdigest()[:10]
    return ExampleFiles(
        name=f"infer_{task.task_id or digest}",  # T5X's name, which the results' files bear
        kind=task.file_type,  # pyright: ignore[reportArgumentType]
        paths=tuple(paths),
        inputs_key=task.inputs_key,
        targets_key=task.targets_key,
        features={
            name: (_vocabulary(feature.vocabulary), feature.add_eos)
            for name, feature in task.features.items()
        },
    )


def _vocabulary(value: Any) -> Any:
    """The vocabulary's own record, if a feature refers to a model's vocabulary."""
    if isinstance(value, records.InputVocabulary):
        return value.model.input_vocabulary
    if isinstance(value, records.OutputVocabulary):
        return value.model.output_vocabulary
    return value
