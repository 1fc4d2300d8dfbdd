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


# What a user may bind by mistake to anything: other types, other signs, texts for values.
VALUES = (
    "None", "True", "False", "'False'", "''", "'nonsense'", "0", "-1", "3", "7", "2.5", "-0.5",
    "1e999", "'3'", "[5]", "(3,)", "[]", "{}", "{'a': 1.0}", "[['a']]", "('tokens_per_batch', -1)",
    "@sublayer_dropout", "@sublayer_dropout()", "%NOSUCH", "@nosuch", "'*['", "'gs://nowhere/x'",
)  # fmt: skip
SCOPES = ("", "", "", "encoder/", "decoder/", "encodr/", "train/")


def mutated_binding(random, arguments: dict) -> str:
    """A line of gin that binds one of the arguments, sometimes misspelled, to any value.

    Args:
      random: A `random.Random`.
      arguments: Name -> default, from which a likely value is made now and then.
    """
    name = random.choice([*arguments])
    default, value = arguments[name], random.choice(VALUES)
    if random.random() < 0.3 and isinstance(default, int | float):
        likely = not default if isinstance(default, bool) else default * 2 or 0.25
        value = str(likely)
    if random.random() < 0.1:
        at = random.randrange(len(name))
        name = name[:at] + name[at + 1 :]
    return f"{random.choice(SCOPES)}{name} = {value}"
