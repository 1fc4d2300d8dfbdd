"""Schemas: what rows are brought to, and what is said of those that do not fit."""

import pytest

from t0repro.tasks.catalog import Alias
from t0repro.tasks.schema import Schema, SchemaError

TEXT = {"_type": "Value", "dtype": "string"}
NUMBER = {"_type": "Value", "dtype": "int32"}
LABEL = {"_type": "ClassLabel", "names": ["entailment", "neutral", "contradiction"]}
ANSWERS = {"_type": "Sequence", "feature": {"text": TEXT, "start": NUMBER}}


def bring(feature, value, **options):
    schema = Schema({"column": feature}, ["column"], **options)
    return schema.bring({"column": value} if not isinstance(value, dict) else value)["column"]


@pytest.mark.parametrize(
    ("feature", "value", "expected"),
    [
        (LABEL, "neutral", 1),
        (LABEL, 2, 2),
        (LABEL, "2", 2),
        (LABEL, -1, -1),
        (LABEL, 1.0, 1),
        ({"_type": "ClassLabel", "names": ["False", "True"]}, True, 1),
        ({"_type": "Value", "dtype": "float32"}, 3, 3.0),
        ({"_type": "Sequence", "feature": TEXT}, ["a", "b"], ["a", "b"]),
        (
            ANSWERS,
            [{"text": "a", "start": 1}, {"text": "b", "start": 2}],
            {"text": ["a", "b"], "start": [1, 2]},
        ),
    ],
)
def test_values_are_brought_to_the_feature(feature, value, expected):
    assert bring(feature, value) == expected


def test_a_label_that_is_text_may_be_a_number_as_pandas_reads_it():
    schema = Schema({"label": TEXT, "ctx": TEXT}, ["label", "ctx"])
    for value in ("3", 3, 3.0):
        assert schema.bring({"label": value, "ctx": "a"}) == {"label": "3", "ctx": "a"}
    for wrong in (0.5, True, float("nan"), None):
        with pytest.raises(SchemaError, match="'label'(.|\n)*text"):
            schema.bring({"label": wrong, "ctx": "a"})


def test_hellaswags_label_as_a_number_renders_as_its_text():
    from t0repro.tasks.rendering import render
    from t0repro.tasks.schema import schema_of
    from t0repro.tasks.templates import load_template

    row = {"ind": 1, "activity_label": "a", "ctx_a": "a", "ctx_b": "b", "ctx": "a b"}
    row |= {"endings": ["w", "x", "y", "z"], "source_id": "s", "split": "train", "split_type": "t"}
    schema = schema_of("hellaswag", None, frozenset(), ())
    template = load_template("hellaswag", None, "Predict ending with hint")
    texts = [render(template, schema.bring({**row, "label": label})) for label in ("2", 2, 2.0)]
    assert texts[0] == texts[1] == texts[2] and texts[0].targets == "y"


def test_a_record_of_lists_becomes_a_list_of_records_where_that_is_the_feature():
    value = {"column": {"text": ["a", "b"], "start": [1, 2]}}
    expected = [{"text": "a", "start": 1}, {"text": "b", "start": 2}]
    assert bring([{"text": TEXT, "start": NUMBER}], value) == expected


@pytest.mark.parametrize(
    ("feature", "value", "reason"),
    [
        (TEXT, None, "'column': it is null where text is wanted"),
        (TEXT, 3, r"it is 3 \(int\), not text"),
        (LABEL, 3, "it is 3; its classes are 0 to 2, or -1 for a hidden label"),
        (LABEL, -2, "it is -2"),
        (LABEL, "maybe", "'maybe', which is none of its classes 'entailment'"),
        (LABEL, "3", "'3', which is none of its classes"),
        (LABEL, True, "none of its classes"),
        (LABEL, None, "null"),
        (NUMBER, "3", "not a whole number"),
        ({"_type": "Sequence", "feature": TEXT}, "text", "not a list"),
        ({"_type": "Sequence", "feature": TEXT}, ["a", None], "inside the list, it is null"),
        (ANSWERS, {"column": {"text": ["a"], "start": [1, 2]}}, "differ in length"),
        (ANSWERS, {"column": {"text": ["a"]}}, "'column.start': it is missing"),
        (ANSWERS, {"column": {"text": ["a"], "start": ["b"]}}, "'column.start': inside the list"),
    ],
)
def test_a_value_that_does_not_fit_is_named_by_its_column(feature, value, reason):
    with pytest.raises(SchemaError, match=reason):
        bring(feature, value)


def test_columns_that_no_template_reads_may_be_missing_or_null_but_not_wrong():
    schema = Schema({"text": TEXT, "id": NUMBER}, ["text"])
    assert schema.bring({"text": "a"}) == {"text": "a"}
    assert schema.bring({"text": "a", "id": None}) == {"text": "a", "id": None}
    assert schema.bring({"text": "a", "id": 1, "more": 2}) == {"text": "a", "id": 1}
    with pytest.raises(SchemaError, match="'id'"):
        schema.bring({"text": "a", "id": "b"})
    with pytest.raises(SchemaError, match="'text': it is missing; the row has 'id'"):
        schema.bring({"id": 1})


def test_classes_of_the_data_are_translated_by_name():
    names = {"column": ["contradiction", "entailment", "neutral"]}
    assert [bring(LABEL, value, class_names=names) for value in (0, 1, 2, -1)] == [2, 0, 1, -1]
    with pytest.raises(SchemaError, match="'other' is none of T0's classes"):
        bring(LABEL, 0, class_names={"column": ["other"]})


def test_a_renamed_label_is_taken_by_the_names_of_its_classes_alone():
    aliases = {"column": [Alias("fine_label", ":")]}
    names = {"fine_label": ["X:contradiction", "Y:neutral"]}
    assert bring(LABEL, {"fine_label": 0}, aliases=aliases, class_names=names) == 2
    assert bring(LABEL, {"fine_label": "Y:neutral"}, aliases=aliases) == 1
    with pytest.raises(SchemaError, match="does not say which class"):
        bring(LABEL, {"fine_label": 0}, aliases=aliases)


def test_promptsources_spelling_of_a_column_is_taken_as_well():
    schema = Schema({"label-fine": NUMBER}, ["label-fine"])
    assert schema.bring({"label_fine": 3}) == {"label-fine": 3}
