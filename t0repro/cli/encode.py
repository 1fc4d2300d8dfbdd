"""`t0repro encode`: writes the encoder's outputs for the lines of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from t0repro.cli.groups import expand_groups
from t0repro.cli.options import AsJson, AttentionOptions, DType
from t0repro.cli.paths import output_file, source
from t0repro.cli.results import echo, print_json
from t0repro.words import counted


@expand_groups
def encode(
    computed_by: AttentionOptions,
    checkpoint: Annotated[
        str,
        typer.Option(callback=source, help="A checkpoint in any format; an encoder alone will do."),
    ],
    texts: Annotated[
        Path,
        typer.Option(
            help="A file with one text a line; in a .jsonl file, a JSON string or a list of token"
            " ids a line."
        ),
    ],
    out: Annotated[
        Path, typer.Option(callback=output_file, help="The file to write: .safetensors or .npz.")
    ],
    pool: Annotated[
        Literal["mean", "first"] | None,
        typer.Option(
            help="One vector a text: the mean over its tokens, or its first token's.",
            show_default="a vector for each token",
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of a text, EOS included.", show_default="no limit"),
    ] = None,
    too_long: Annotated[
        Literal["cut", "error"],
        typer.Option(help="Cut longer texts and say how many, or refuse them."),
    ] = "cut",
    vocab: Annotated[
        str | None,
        typer.Option(
            callback=source,
            help="The SentencePiece model of the texts.",
            show_default="the checkpoint's own",
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint.", show_default="the latest")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Texts on the devices at once; it changes no bit of the result.",
            show_default="auto",
        ),
    ] = None,
    activation: Annotated[
        DType, typer.Option(help="Type of the activations and of the result.")
    ] = "float32",
    as_json: AsJson = False,
) -> None:
    r"""Write a T5 encoder's outputs for each line of a file.

    `embeddings` in the output has all vectors, one after another, and `offsets` where each text's
    begin. If it is interrupted, starting it again continues where it stopped.

    Example:
      t0repro encode --checkpoint runs/t0_3b --texts prompts.txt \
        --pool mean --out prompts.safetensors
    """
    del computed_by  # it set a variable
    from t0repro.runs.encoded_output import check_files  # it imports NumPy

    check_files(texts, out, activation)
    echo("importing JAX ...", err=True)
    from t0repro.runs.encode_file import encode_file  # it imports JAX

    encoded = encode_file(
        checkpoint,
        texts,
        out,
        step=step,
        vocabulary=vocab,
        pool=pool,
        batch_size=batch_size,
        dtype=activation,
        length=length,
        too_long=too_long,
    )
    if as_json:
        print_json(encoded)
        return
    again = f", {encoded.resumed:,} of them before the interruption" if encoded.resumed else ""
    rows = counted(encoded.rows, "text")
    echo(f"encoded {rows} of {counted(encoded.tokens, 'token')}{again}")
    echo(f"wrote {encoded.path}")
