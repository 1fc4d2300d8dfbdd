"""Small vocabularies in the forms in which those of T5, mT5, umT5 and MADLAD-400 are released."""

from __future__ import annotations

from pathlib import Path

from sentencepiece import sentencepiece_model_pb2 as pb

from t0repro.tasks.demo.datasets import VOCABULARY

_PIECE = pb.ModelProto.SentencePiece


def write_vocabulary(
    path: Path, *, pieces: int | None = None, inside: int = 0, mark: str = "\u2581", **ids: int
) -> Path:
    """Writes the demo's vocabulary with more pieces, and with sentinels among them.

    Args:
      path: The file.
      pieces: Number of pieces, with fillers that no text has; by default the demo's.
      inside: Number of sentinels at the end, as user-defined pieces.
      mark: What their names begin with.
      **ids: Of `unk`, `bos` and `eos`; with any, none pads, as in SentencePiece's own default.
    """
    model = pb.ModelProto.FromString(VOCABULARY.read_bytes())
    for number in range((pieces or 0) - inside - len(model.pieces)):
        model.pieces.add(piece=f"\u2581\u2603{number}", score=-30.0 - number * 1e-6)
    for number in reversed(range(inside)):
        model.pieces.add(piece=f"{mark}<extra_id_{number}>", score=0.0, type=_PIECE.USER_DEFINED)
    if ids:
        ends = {"unk": ("<unk>", _PIECE.UNKNOWN), "bos": ("<s>", _PIECE.CONTROL)}
        for name, (piece, kind) in {**ends, "eos": ("</s>", _PIECE.CONTROL)}.items():
            if ids[name] >= 0:
                model.pieces[ids[name]].piece, model.pieces[ids[name]].type = piece, kind
        model.trainer_spec.unk_id, model.trainer_spec.eos_id = ids["unk"], ids["eos"]
        model.trainer_spec.bos_id, model.trainer_spec.pad_id = ids["bos"], -1
    path.write_bytes(model.SerializeToString())
    return path
