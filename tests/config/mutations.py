"""Random damage to a gin file, for tests of both dialects."""

from pathlib import Path

from hypothesis import HealthCheck
from hypothesis import strategies as st

PIECES = st.sampled_from(
    ["'", '"', "(", ")", "[", "]", "{", "}", "@", "%", "/", ".", ",", "=", ":", "\n", "\\", "#",
     " ", "-", "0", "9", "1e9", "None", "True", "nan", "()", "\t", "\x00", "\U0001f642", "é",
     "include", "import ", "run.", "d_model", "encoder/", "''", "  ", "*", ";"]
)  # fmt: skip


# Settings of hypothesis.
FUZZ = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@st.composite
def mutated(draw, text: str) -> bytes:
    """A gin file with one to four changes: pieces cut, put in, doubled or moved, or bad bytes."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        kind = draw(st.sampled_from(["cut", "put", "replace", "double", "line", "end"]))
        if kind == "cut":
            text = text[:start] + text[end:]
        elif kind == "put":
            text = text[:start] + draw(PIECES) + text[start:]
        elif kind == "replace":
            text = text[:start] + draw(PIECES) + text[end:]
        elif kind == "double":
            text = text[:end] + text[start:]
        elif kind == "line":
            lines = text.split("\n")
            index = draw(st.integers(0, len(lines) - 1))
            lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(index))
            text = "\n".join(lines)
        else:
            text = text[:start]
    data = text.encode()
    if draw(st.integers(0, 19)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(min_size=1, max_size=3)) + data[at:]
    return data


def folder_for_files(factory) -> Path:
    """One folder for all examples of a test: hypothesis runs them within one call of it."""
    folder = factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    return folder
