"""A T5 encoder with the call of transformers' FlaxT5EncoderModel, which version 5 removed."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.converters.hf import read_config
from t0repro.converters.hf_config import TokenIds
from t0repro.converters.released import OPT_IN
from t0repro.errors import UserError
from t0repro.evaluation.opened import Checkpoint, open_encoder
from t0repro.model.attention_mask import AttentionMask
from t0repro.model.shapes import Array, Float, Int
from t0repro.model.t5 import T5, padding_mask

_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.msgpack", "spiece.model")


class EncoderOutput(dict[str, jax.Array]):
    """The encoder's outputs, by name, as an attribute, or first in a tuple, as in transformers."""

    @property
    def last_hidden_state(self) -> jax.Array:
        """The last hidden state: [batch, length, d_model]."""
        return self["last_hidden_state"]

    def __getitem__(self, key: Any) -> Any:
        return (
            tuple(self.values())[key] if isinstance(key, int | slice) else super().__getitem__(key)
        )


class FlaxT5EncoderModel:
    """An encoder of the T5 family: T5, mT5, umT5, ByT5 and their kin.

    Attributes:
      params: The parameters, a nested dictionary with T5X's names; another tree of the same
        structure may be assigned, for instance in another dtype or on other devices.
      config: The fields of config.json, as attributes.
      dtype: Of the activations and the outputs.
    """

    def __init__(self, checkpoint: Checkpoint, config: SimpleNamespace):
        self.params, self.config = checkpoint.params, config
        self._model = checkpoint.model
        self.dtype = jnp.dtype(self._model.dtypes.activation)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        dtype: Any = jnp.float32,
        subfolder: str = "",
        revision: str | None = None,
        **options: Any,
    ) -> FlaxT5EncoderModel:
        """Reads a checkpoint of any format, a whole model or an encoder alone.

        Args:
          pretrained_model_name_or_path: A folder, or a name on the hub. The hub's cache on this
            machine is read; T0REPRO_CHECKPOINT_HUB=1 allows a download.
          dtype: Of the activations: float32 or bfloat16. Parameters that are only used in it are
            cast to it.
          subfolder: Of the folder or repository, for instance diffusers' text_encoder_2.
          revision: Of the repository.
          **options: from_pt, use_safetensors and the like, which change nothing here: the format
            is recognized.

        Raises:
          UserError: If there is no such checkpoint, or it has no encoder.
        """
        del options
        folder = _local_folder(os.fspath(pretrained_model_name_or_path), subfolder, revision)
        name = jnp.dtype(dtype).name
        if name not in ("float32", "bfloat16"):
            raise UserError(f"The dtype {name} is not supported.", fix="Use float32 or bfloat16.")
        return cls(open_encoder(folder, name), _config(folder))

    def __call__(
        self,
        input_ids: Int[Array, "batch length"] | np.ndarray,
        attention_mask: Int[Array, "batch length"] | np.ndarray | None = None,
        *,
        params: Any = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        dropout_rng: Any = None,
    ) -> EncoderOutput | tuple[jax.Array]:
        """The encoder's outputs for padded rows: [batch, length, d_model], in `dtype`.

        As in transformers, a mask hides padding as a key only: the outputs at padding are not zero.
        Without a mask every position is seen, padding included.

        Raises:
          UserError: If hidden states, attentions or dropout are asked for.
        """
        del dropout_rng
        if output_hidden_states or output_attentions or train:
            raise UserError(
                "Only the last hidden state is computed, without dropout.",
                fix="Leave out output_hidden_states, output_attentions and train.",
            )
        ids = jnp.asarray(input_ids, jnp.int32)
        mask = jnp.ones_like(ids) if attention_mask is None else jnp.asarray(attention_mask)
        params = self.params if params is None else params
        # transformers' callers pass the variables in either form.
        params = params.get("params", params)
        outputs = _encode(self._model, params, ids, (mask != 0).astype(jnp.int32))
        return (outputs,) if return_dict is False else EncoderOutput(last_hidden_state=outputs)


@functools.partial(jax.jit, static_argnums=0)
def _encode(
    model: T5, params: dict, ids: Int[Array, "batch length"], mask: Int[Array, "batch length"]
) -> Float[Array, "batch length d_model"]:
    def call(module: T5) -> jax.Array:
        visible = AttentionMask(jnp.ones_like(mask), mask)
        return module.encoder(ids, visible, padding_mask(None, module.dtypes), deterministic=True)

    outputs = model.apply({"params": params}, method=call)
    assert isinstance(outputs, jax.Array)
    return outputs


def _local_folder(name: str, subfolder: str, revision: str | None) -> str:
    """The folder of a checkpoint; for a name of the hub, that of its cache on this machine.

    Raises:
      UserError: If there is neither.
    """
    if not os.path.isdir(name) and name.count("/") == 1 and not name.startswith(("/", ".", "~")):
        name = _hub_folder(name, subfolder, revision)
    return os.path.join(name, subfolder) if subfolder else name


def _hub_folder(name: str, subfolder: str, revision: str | None) -> str:
    patterns = [os.path.join(subfolder, pattern) for pattern in _FILES]
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        found = None
    else:
        try:
            return snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                local_files_only=os.environ.get(OPT_IN) != "1",
            )
        except LocalEntryNotFoundError as error:
            found = error
    raise UserError(
        "There is no such folder, and the hub's cache on this machine does not have the model.",
        where=name,
        fix=f"Give a local folder, or set {OPT_IN}=1 to allow a download by huggingface_hub.",
    ) from found


def _config(folder: str) -> SimpleNamespace:
    """The content of config.json; of another format's checkpoint, what a conversion would write."""
    from t0repro.converters import finding, hf_files, sources
    from t0repro.converters.model_files import arithmetic, arithmetic_source, gin_text

    ref = finding.find_checkpoint(folder)
    if ref.format == "hf":
        return SimpleNamespace(**read_config(ref.path))
    shape, source = sources.check_checkpoint(sources.open_checkpoint(ref)), arithmetic_source(ref)
    computed = arithmetic(source, shape, gin_text(source))
    return SimpleNamespace(**hf_files.model_config(shape, "float32", computed, TokenIds()))
