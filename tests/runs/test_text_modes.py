"""Lines in, lines out, as Mesh TensorFlow reads and writes them."""

import pytest

from t0repro.config.decoding import InferConfig, ScoreStringsConfig
from t0repro.errors import UserError
from t0repro.runs import text_files


class Letters:
    """A vocabulary of letters."""

    def encode(self, text):
        return [ord(letter) for letter in text]


def test_lines_lose_trailing_space_and_one_empty_line_at_the_end(tmp_path):
    path = tmp_path / "lines"
    path.write_text(" a b \t\n\n\u2028c\r\n\n")
    assert text_files.read_lines(str(path), "x") == [" a b", "", "\u2028c"]
    path.write_text("a")
    assert text_files.read_lines(str(path), "x") == ["a"]


@pytest.mark.parametrize("content", ["caf\xe9".encode("latin-1"), "a".encode("utf-16")])
def test_lines_that_are_not_utf_8_are_named(tmp_path, content):
    path = tmp_path / "lines"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path} is not UTF-8: .* at byte") as caught:
        text_files.read_lines(str(path), "decode_from_file.input_filename")
    assert caught.value.where == "decode_from_file.input_filename"


def test_each_line_is_decoded_as_often_as_it_is_to_be(tmp_path):
    path = tmp_path / "lines"
    path.write_text("a\nb\n")
    assert text_files.infer_inputs(InferConfig(str(path), "out", 1, 2)) == ["a", "a", "b", "b"]


def test_a_line_is_encoded_without_space_around_it_with_eos_and_cut():
    found = text_files.encode_lines([" ab ", "", "abcd"], Letters(), 1, 3)
    assert [ids.tolist() for ids in found] == [[97, 98, 1], [1], [97, 98, 99]]


@pytest.mark.parametrize(
    ("inputs", "targets", "expected"),
    [
        (("a", "b"), ("x", "y"), (["a", "b"], ["x", "y"])),
        (("a", "b"), ("x", "y", "z", "w"), (["a", "a", "b", "b"], ["x", "y", "z", "w"])),
        (("a", "b"), ("x",), (["a", "b"], ["x", "x"])),
    ],
)
def test_targets_are_shared_out_among_inputs(inputs, targets, expected):
    assert text_files.strings_to_score(ScoreStringsConfig(inputs, targets, 1, True)) == expected


@pytest.mark.parametrize(
    ("inputs", "targets", "part"),
    [
        (("a", "b"), ("x", "y", "z"), "3 targets"),
        (("a", "b", "c"), ("x", "y"), "3 inputs need more than 2 targets"),
        (None, ("x",), "needs inputs"),
        ("/no/such", ("x",), "/no/such"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(inputs, targets, part):
    with pytest.raises(UserError, match=part):
        text_files.strings_to_score(ScoreStringsConfig(inputs, targets, 1, True))


def test_newlines_within_a_line_are_written_as_spaces(tmp_path):
    text_files.write_lines(tmp_path / "folder" / "out", ["a\nb", 3])
    assert (tmp_path / "folder" / "out").read_text() == "a b\n3\n"
