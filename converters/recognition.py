"""Recognizes which T5 a checkpoint contains, from its tensors' names and shapes only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from t0repro.errors import UserError, nearest_names
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape, describe
from t0repro.words import counted, some


def recognise(names_and_shapes: Mapping[str, Iterable[int]]) -> ModelShape:
    """Infers a model's sizes from its parameters.

    Reads only the few parameters that determine the sizes; `check_parameters` checks all.

    Args:
      names_and_shapes: Shapes by Mesh TensorFlow's variable names, by T5X's flat keys or by T5X's
        paths. Ignores slots, the step and names that no T5 has.

    Raises:
      UserError: If one of these parameters is missing or its shape fits no T5.
    """
    shapes = _parameter_shapes(names_and_shapes)
    decoder_only = naming.DECODER_ONLY[0].t5x in shapes
    shared = naming.has_shared_towers({naming.PARAMETERS + path for path in shapes})
    tower = "decoder" if decoder_only or shared else "encoder"
    attention = f"{tower}/layers_0/{'attention' if tower == 'encoder' else 'self_attention'}"
    embedding = _matrix(shapes, ("decoder/" if decoder_only else "") + "token_embedder/embedding")
    bias_per_layer = naming.has_bias_per_layer(shapes)
    first_bias = f"{tower}/{'layers_0/' if bias_per_layer else ''}{naming.RELATIVE_BIAS}"
    bias = _matrix(shapes, first_bias)
    query = _matrix(shapes, f"{attention}/query/kernel")
    output = _matrix(shapes, f"{tower}/layers_0/mlp/wo/kernel")
    # wi_0 or wi_1: if one is missing, check_parameters reports it by name later.
    mlp = f"{tower}/layers_0/mlp/{{}}/kernel"
    gated = mlp.format("wi_0") in shapes or mlp.format("wi_1") in shapes
    if bias[0] == 0 or query[1] % bias[0]:
        raise UserError(
            f"The shapes fit no T5: attention kernels are {query[1]} wide, which is not a multiple"
            f" of the {bias[0]} heads of the relative position bias.",
            where=f"{attention}/query/kernel, {first_bias}",
        )
    return ModelShape(
        num_encoder_layers=_count_layers(shapes, "decoder" if shared else "encoder"),
        num_decoder_layers=_count_layers(shapes, "decoder"),
        d_model=embedding[1],
        d_ff=output[0],
        num_heads=bias[0],
        d_kv=query[1] // bias[0],
        vocab_size=embedding[0],
        relative_attention_num_buckets=bias[1],
        wi_kernels=("wi_0", "wi_1") if gated else ("wi",),
        tied="decoder/logits_dense/kernel" not in shapes,
        shared_towers=shared,
        position_bias_per_layer=bias_per_layer,
    )


def _parameter_shapes(
    names_and_shapes: Mapping[str, Iterable[int]],
) -> dict[str, tuple[int, ...]]:
    """T5X path -> shape of every parameter."""
    paths = {name: _path(name) for name in names_and_shapes}
    # A bias variable of Mesh TensorFlow belongs to its tower or to its layer, depending on whether
    # other layers also have one, so read the names again once that is known.
    if naming.has_bias_per_layer(paths.values()):
        paths = {name: _path(name, bias_per_layer=True) for name in names_and_shapes}
    return {path: tuple(names_and_shapes[name]) for name, path in paths.items() if path}


def _path(name: str, bias_per_layer: bool | None = None) -> str | None:
    path = name.removeprefix(naming.PARAMETERS)
    if any(naming.find_row(path, "t5x", decoder_only) for decoder_only in (False, True)):
        return path
    return naming.mtf_to_path(name, bias_per_layer)


def _matrix(shapes: Mapping[str, tuple[int, ...]], path: str) -> tuple[int, ...]:
    if path not in shapes:
        raise UserError(
            f"This is not a T5 encoder-decoder: it has no {path} (in Mesh TensorFlow's names:"
            f" {naming.path_to_mtf(path)}).",
            fix="Check the path; of models without an encoder only those with one shared relative"
            " position bias and no positions of another kind can be converted.",
        )
    if len(shapes[path]) != 2:
        raise UserError(f"{path} should be a matrix, but has the shape {shapes[path]}.")
    return shapes[path]


def _count_layers(shapes: Mapping[str, tuple[int, ...]], tower: str) -> int:
    # Decoder-only trees use the decoder's names, so the common table applies.
    found = (naming.find_row(path, "t5x") for path in shapes)
    numbers = [
        layer for row, layer in filter(None, found) if row.tower == tower and layer is not None
    ]
    return max(numbers, default=-1) + 1


def check_parameters(
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    native_name: Callable[[str], str] = str,
) -> ModelShape:
    """Checks that paths and shapes are exactly those of one T5, and returns its sizes.

    Args:
      shapes: T5X path -> shape of every parameter in the checkpoint.
      where: The checkpoint's path, for messages.
      native_name: T5X path -> the name familiar to the user.

    Raises:
      UserError: Naming parameters that are missing, unknown or of the wrong shape.
    """
    family = recognise(shapes)
    expected = family.parameters()
    if missing := [native_name(path) for path in expected if path not in shapes]:
        raise UserError(
            f"{counted(len(missing), 'variable')} of a {family.name} missing: {some(missing)}.",
            where=where,
            fix="The checkpoint is incomplete; get it again from where it came from.",
        )
    if unknown := [path for path in shapes if path not in expected]:
        raise unknown_variable(
            [native_name(path) for path in unknown], map(native_name, expected), where
        )
    for path, shape in expected.items():
        if shapes[path] != shape:
            raise UserError(
                f"{native_name(path)} has the shape {shapes[path]}, but the other variables call"
                f" for {shape} ({describe(family)}).{_hint(path)}",
                where=where,
            )
    return family


def unknown_variable(names: list[str], known: Iterable[str], where: str) -> UserError:
    """Returns the error for variables that belong to no T5, each with the nearest known names."""
    known = list(known)
    # Finding the nearest of thousands takes time, and only five are shown.
    shown = [f"{name!r} (nearest: {nearest_names(name, known, 3)})" for name in names[:5]]
    nearest = some([*shown, *names[5:]], separator="; ")
    return UserError(
        f"{counted(len(names), 'unknown variable')}: {nearest}.",
        where=where,
        fix="Only T5s and their Adafactor or Adam slots can be converted.",
    )


def _hint(path: str) -> str:
    if path == "decoder/logits_dense/kernel":
        return " The vocabularies of the embedding and of the logits differ."
    return ""
