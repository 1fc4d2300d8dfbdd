"""Opens a checkpoint of any format for evaluation."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from t0repro.config.model import (
    Activation,
    Arithmetic,
    DType,
    DTypePolicy,
    Layout,
    ModelConfig,
)
from t0repro.config.settings import shared_values
from t0repro.converters.witnesses import ParametersDigest
from t0repro.errors import UserError
from t0repro.parameters import naming

if TYPE_CHECKING:
    from t0repro.converters import hf_config
    from t0repro.converters.adapter_files import AdapterCheckpoint
    from t0repro.converters.tensors import CheckpointRef, StoredTensor
    from t0repro.parameters.shape import ModelShape
    from t0repro.training.train_state import OpenTree

_CONFIG = "operative_config.gin"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
      path: where it was read from.
      step: its global step; 0 if the checkpoint has none.
      digest: hash of all parameters' names, dtypes, shapes and values.
      params: the parameters, a nested dictionary.
      model: a t0repro.model.t5.T5.
      folders: where files about it are, of an adapter its base's folder too.
    """

    path: str
    step: int
    digest: str
    params: dict
    model: Any
    folders: tuple[str, ...] = ()

    def computation(self) -> dict[str, Any]:
        """What the logits depend on besides the parameters, in JSON's types; {} without a model.

        Equal parameters do not mean equal scores: config.json or a gin file beside them may have
        been corrected since.
        """
        if self.model is None:
            return {}
        # Through JSON, so that it compares with what was read from a file.
        return json.loads(json.dumps(dataclasses.asdict(self.model.config)))

    def training_config(self) -> str | None:
        """The training run's operative_config.gin, from the checkpoint's folder or its parent."""
        # A folder that transformers loads has its own; a run has one for all of its checkpoints.
        for folder in (Path(self.path), Path(self.path).parent):
            path = folder / _CONFIG
            if path.is_file():
                return path.read_text(encoding="utf-8")
        return None


def open_checkpoint(
    path: str, step: int | None, activation: DType, model_parallelism: int = 1
) -> Checkpoint:
    """Reads a checkpoint of any format and infers the model.

    Sizes come from the parameters. What these do not show, such as the activation, comes from
    config.json or from the operative_config.gin beside the checkpoint; otherwise from T5 1.0 and
    1.1.

    An adapter is opened with its base: see `attach_adapter`. The parameters are sharded across all
    devices.

    Args:
      path: the checkpoint.
      step: the step to read, in the form that converters.finding.find_checkpoint takes.
      activation: dtype of the activations, and of the parameters that are cast to it anyway.
      model_parallelism: number of devices that share each layer.

    Raises:
      UserError: if there is no checkpoint, or it is damaged, incomplete or no T5.
    """
    from t0repro.converters import finding, sources
    from t0repro.converters.adapter_files import is_adapter, open_adapter

    ref = finding.find_checkpoint(path, step)
    # What an adapter alone shows does not describe the model.
    if is_adapter(ref):
        where = sources.base_of(ref).path
        base = open_checkpoint(where, None, activation, model_parallelism)
        return attach_adapter(base, open_adapter(ref))
    tree = sources.open_tree(ref, slots=False)
    return _load(ref, tree, path, activation, model_parallelism)


def check_checkpoint(
    path: str, step: int | None, model_parallelism: int, adapters: Iterable[str] = ()
) -> Checkpoint:
    """A checkpoint without parameters, after the checks of `open_checkpoint` that read none.

    Args:
      path: see `open_checkpoint`.
      step: see `open_checkpoint`.
      model_parallelism: see `open_checkpoint`.
      adapters: paths of adapters that are to be attached to it.

    Raises:
      UserError: see `open_checkpoint`; or if an adapter has other sizes.
    """
    from t0repro.converters import finding, sources
    from t0repro.converters.adapter_files import is_adapter, open_adapter
    from t0repro.model.t5 import T5
    from t0repro.partitioning.devices import choose

    ref = finding.find_checkpoint(path, step)
    owns = [open_adapter_at(adapter) for adapter in adapters]
    if is_adapter(ref):
        if owns:
            raise _adapter_as_base(path)
        base = check_checkpoint(sources.base_of(ref).path, None, model_parallelism)
        found = dataclasses.replace(base, path=path, folders=(ref.folder, *base.folders))
        owns.append(open_adapter(ref))
    else:
        _, config = _infer_model(ref, sources.open_tree(ref, slots=False), path)
        choose(Layout(model=model_parallelism), config, where="--model_parallelism")
        model = T5(config, DTypePolicy("float32", "float32", "float32"))
        found = Checkpoint(path, 0, "", {}, model, (ref.folder,))
    for own in owns:
        own.check_shape(own.note.adapter, found.model.config.shape)
    return found


def open_encoder(path: str, activation: DType, step: int | None = None) -> Checkpoint:
    """Reads a checkpoint's encoder and embedding; an adapter is merged into its base.

    Args:
      path: a checkpoint of any format, of a whole model or of an encoder alone.
      activation: see `open_checkpoint`.
      step: see `open_checkpoint`.

    Raises:
      UserError: if there is no checkpoint, or it is damaged, incomplete or no T5 with an encoder.
    """
    from t0repro.converters import finding, sources

    ref = finding.find_checkpoint(path, step)
    tree = sources.open_tree(ref, slots=False, encoder_only=True)
    if naming.is_decoder_only(tree):
        raise _make_no_encoder_error(path)
    return _load(ref, tree, path, activation, encoder_only=True)


def encoder_shape(path: str, step: int | None = None) -> ModelShape:
    """The shape of the model that `open_encoder` would open; reads no values.

    Raises:
      UserError: as `open_encoder`.
    """
    from t0repro.converters import finding, sources

    shape = sources.check_checkpoint(sources.open_checkpoint(finding.find_checkpoint(path, step)))
    if shape.decoder_only:
        raise _make_no_encoder_error(path)
    return shape


def _make_no_encoder_error(path: str) -> UserError:
    return UserError(
        "The model has no encoder.",
        where=path,
        fix="Give a model with an encoder, or an encoder alone.",
    )


def open_cached(
    open_one: Callable[[str, DType, int | None], Checkpoint],
    model: str | os.PathLike[str] | Checkpoint,
    activation: DType,
    step: int | None,
) -> Checkpoint:
    """A path's checkpoint, which stays in memory until another is asked for; or an open one.

    Args:
      open_one: how to open it.
      model: the checkpoint; it is opened again if its files, or those that set its arithmetic,
        change.
      activation: dtype of the activations, if it is not open.
      step: step of the checkpoint; the latest by default.

    Raises:
      UserError: if there is none, or the open one is of another step.
    """
    from t0repro.converters import finding, model_files

    if isinstance(model, Checkpoint):
        if step not in (None, model.step):
            raise UserError(
                f"The checkpoint that is open is of step {model.step}.",
                where=f"step={step}",
                fix="Leave the step out, or give the path of the checkpoints.",
            )
        return model
    # A folder's latest checkpoint changes during training, and a file when it is replaced.
    version = model_files.version(finding.find_checkpoint(model, step))
    return _open_version(open_one, os.fspath(model), json.dumps(version), activation, step)


@functools.lru_cache(maxsize=1)
def _open_version(
    open_one: Callable[[str, DType, int | None], Checkpoint],
    path: str,
    version: str,
    activation: DType,
    step: int | None,
) -> Checkpoint:
    del version  # only part of the cache key
    return open_one(path, activation, step)


def _load(
    ref: CheckpointRef,
    tree: Mapping[str, StoredTensor],
    path: str,
    activation: DType,
    model_parallelism: int = 1,
    *,
    encoder_only: bool = False,
) -> Checkpoint:
    """Infers the model of an open tree and puts its parameters, or the encoder's, on the devices.

    Raises:
      UserError: if the JAX stack cannot compute the model, or it is damaged.
    """
    from t0repro.model.t5 import T5, evaluation_shapes
    from t0repro.partitioning.devices import choose, describe_devices
    from t0repro.training.train_state import checkpoint_shapes

    family, config = _infer_model(ref, tree, path)
    layout = Layout(model=model_parallelism)
    devices = choose(layout, config, where="--model_parallelism")
    if devices.mesh.size > 1:
        print(describe_devices(devices, layout), file=sys.stderr)
    model = T5(config, DTypePolicy("float32", "float32", activation))
    if encoder_only and not family.shared_towers:
        read = (f"{naming.PARAMETERS}token_embedder/", f"{naming.PARAMETERS}encoder/", naming.STEP)
        tree = {key: tensor for key, tensor in tree.items() if key.startswith(read)}
    shapes = devices.shapes_on_devices(evaluation_shapes(model, checkpoint_shapes(tree)))
    return dataclasses.replace(load_on_devices(tree, shapes, model, path), folders=(ref.folder,))


def _infer_model(
    ref: CheckpointRef, tree: Mapping[str, StoredTensor], path: str
) -> tuple[ModelShape, ModelConfig]:
    """The model that an open tree, and the files beside it, are of."""
    from t0repro.converters.model_files import (
        arithmetic,
        arithmetic_source,
        check_run_files,
        gin_text,
    )
    from t0repro.parameters.shape import recognize

    family = recognize({name: tensor.shape for name, tensor in tree.items()})
    check_run_files(ref, family)
    source = arithmetic_source(ref)
    return family, make_scoring_config(family, arithmetic(source, family, gin_text(source)), path)


def open_adapter_at(path: str) -> AdapterCheckpoint:
    """Opens an adapter's checkpoint, or a folder of PEFT's, without its base.

    Raises:
      UserError: If there is none, or it is a whole model's, or damaged.
    """
    from t0repro.converters.adapter_files import open_adapter
    from t0repro.converters.finding import find_adapter

    return open_adapter(find_adapter(path))


def check_adapter_fits(base: Checkpoint, own: AdapterCheckpoint) -> None:
    """Checks an adapter against an opened base, before anything is computed.

    Raises:
      UserError: If the base is an adapter's too; or if the adapter was trained on another (with
        both hashes), or has other sizes.
    """
    from t0repro.converters import sources

    if base.model.config.adapter is not None:
        raise _adapter_as_base(base.path)
    sources.check_base(own.note, base.digest, base.path)
    own.check_shape(own.note.adapter, base.model.config.shape)


def _adapter_as_base(path: str) -> UserError:
    return UserError(
        "The checkpoint is itself an adapter, and another is to be attached to it.",
        where=path,
        fix="Name the base as the checkpoint, or leave out the other adapter: an adapter's own base"
        " is found by itself.",
    )


def attach_adapter(base: Checkpoint, own: AdapterCheckpoint) -> Checkpoint:
    """Attaches an adapter to an opened base, whose parameters stay where they are.

    Args:
      base: The base; any number of adapters may share it.
      own: The adapter, from `open_adapter_at`.

    Raises:
      UserError: See `check_adapter_fits`.
    """
    import jax

    from t0repro.adapters import join_adapter
    from t0repro.model.t5 import T5, adapter_shapes
    from t0repro.training.train_state import parameters_from_flat_tree

    check_adapter_fits(base, own)
    adapter = own.note.adapter
    model = T5(base.model.config.with_adapter(adapter), base.model.dtypes)
    like = _replicate_shapes(adapter_shapes(model), base.params)
    digest = ParametersDigest()
    # What the logits depend on besides the adapter's own parameters.
    digest.add(f"{base.digest} {adapter.scale!r} {adapter.base_dtype}", np.zeros(()))
    tree = {key: own.read(key) for key in own.tensors if not key.startswith(naming.SLOTS)}
    params = parameters_from_flat_tree(tree, like, where=own.ref.path, seen=digest.add)
    frozen = base.params
    if adapter.base_dtype == "bfloat16":
        # The adapter was trained on values of this type.
        frozen = jax.tree.map(lambda x: x.astype(adapter.base_dtype), frozen)
    return dataclasses.replace(
        base,
        path=own.ref.path,
        step=int(tree[naming.STEP]),
        digest=digest.hexdigest(),
        params=join_adapter(frozen, params, adapter.scale),
        model=model,
        folders=(own.ref.folder, *base.folders),
    )


def _replicate_shapes(shapes: Any, params: Any) -> Any:
    """Shapes of arrays that are whole on each of the devices that share a model's parameters."""
    import jax

    place = jax.tree.leaves(params)[0].sharding
    if not isinstance(place, jax.sharding.NamedSharding):
        return shapes
    whole = jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes)


def make_scoring_config(
    family: ModelShape, computed: hf_config.Computation, path: str
) -> ModelConfig:
    """The model for scoring: without dropout and without the options of a loss.

    Raises:
      UserError: if the JAX stack cannot compute it.
    """
    if unknown := set(computed.activations) - set(get_args(Activation)):
        raise UserError(
            f"The JAX stack does not have the activation {unknown.pop()!r}.",
            where=path,
            fix="Evaluate it with --backend=mtf.",
        )
    if computed.input_full_attention and not computed.one_way_position_buckets:
        # Its scores have not been shown to be Mesh TensorFlow's.
        raise UserError(
            "t0repro ranks no answers with Mesh TensorFlow's prefix language models"
            " (Unitransformer.input_full_attention).",
            where=path,
            fix="Score its texts with t5_mesh_transformer's mode score_from_dataset.",
        )
    config = ModelConfig(
        **shared_values(family, ModelConfig),
        **shared_values(computed, ModelConfig),
        logits_from_embedding=family.tied,
        relative_attention_max_distance=computed.max_distance,
        rms_norm_epsilon=computed.epsilon,
        dropout_rate=0.0,
        label_smoothing=0.0,
        z_loss=0.0,
        loss_denominator=None,
        model_type="lm" if family.decoder_only else "bitransformer",
        arithmetic=Arithmetic(one_way_position_buckets=computed.one_way_position_buckets),
    )
    config.check_position_buckets(path)
    return config


def load_on_devices(tree: OpenTree, shapes: Any, model: Any, path: str) -> Checkpoint:
    """Puts a checkpoint's parameters on the devices, reading and hashing one at a time.

    Args:
      tree: The checkpoint's entries, without slots.
      shapes: The parameters' shapes, dtypes and shardings on the devices.
      model: A t0repro.model.t5.T5.
      path: The checkpoint's path.

    Raises:
      UserError: If a parameter is missing, has another shape or cannot be read.
    """
    from t0repro.training.train_state import parameters_from_flat_tree

    digest = ParametersDigest()
    params = parameters_from_flat_tree(tree, shapes, where=path, seen=digest.add)
    # A checkpoint that transformers wrote has no step.
    step = int(np.asarray(tree.get("state/step", 0)))
    return Checkpoint(path, step, digest.hexdigest(), params, model)
