"""What gin binds of decoding, infer and scoring is read, or refused by name and place."""

from typing import Any

import pytest

from t0repro.config.checkpoints import CheckpointChoice
from t0repro.config.decoding import DecodingConfig, InferConfig, ScoreStringsConfig
from t0repro.config.mtf import dialect
from t0repro.config.mtf.parser import MeshInputs
from t0repro.errors import UserError

PARAMS = (
    "MIXTURE_NAME = 'demo_train'",
    "utils.run.mesh_shape = []",
    "run.train_steps = 20",
    "run.batch_size = 4",
    "run.sequence_length = {'inputs': 64, 'targets': 16}",
)
EVALUATED = (
    "run.mode = 'eval'",
    "run.eval_dataset_fn = @t5.models.mesh_transformer.mesh_eval_dataset_fn",
    "mesh_eval_dataset_fn.mixture_or_task_name = %MIXTURE_NAME",
)


def load(*params: str, files: tuple[str, ...] = ()) -> Any:
    inputs = MeshInputs(
        "a_model_dir",
        ("dataset.gin", "demo/t5.1.1.demo.gin", *files),
        (*PARAMS, *params),
        module_imports=("t0repro.tasks.demo",),
    )
    return dialect.load(inputs).run


def test_nothing_bound_is_greedy_decoding_with_mesh_tensorflows_defaults():
    config = load(*EVALUATED)
    assert config.decoding == DecodingConfig(1, 0.6, 0.0, -1, 1.5, 10, None, 2, 1)
    assert config.checkpoint_choice == CheckpointChoice(0, None, True)
    assert config.perplexity_eval_steps == 100 and config.save_example_text


def test_t5s_decoding_files_are_read_with_their_lines():
    beams = load(*EVALUATED, "beam_search.num_prefilter = 0", files=("eval.gin", "beam_search.gin"))
    assert beams.decoding == DecodingConfig(4, 0.6, 0.0, -1, 1.5, 10, 128, 0, 1)
    assert "beam_search.gin:" in beams.provenance["decoding.beam_size"]
    assert "eval.gin:" in beams.provenance["decoding.max_length"]
    sampled = load(
        *EVALUATED, "Bitransformer.decode.sampling_keep_top_k = 9", files=("sample_decode.gin",)
    )
    assert (sampled.decoding.temperature, sampled.decoding.keep_top_k) == (1.0, 9)


def test_the_vocabulary_is_split_as_the_mesh_splits_it():
    assert load(*EVALUATED, "utils.run.mesh_shape = 'model:2,batch:2'").decoding.vocab_parts == 2


def test_the_files_of_infer_and_scoring_are_read():
    names = ("input_filename = 'in'", "output_filename = 'out'")
    infer = load(*names, "decode_from_file.repeats = 3", files=("infer.gin",))
    assert infer.text == InferConfig("in", "out", 1, 3)
    assert infer.eval_checkpoint_step == "all"
    names = ("inputs_filename = ['a', 'b']", "targets_filename = 'out'", "scores_filename = 's'")
    strings = load(*names, "score_from_strings.score_eos = False", files=("score_from_file.gin",))
    assert strings.text == ScoreStringsConfig(("a", "b"), "out", 1, False)
    assert strings.scores_filename == "s"
    scored = load("MIXTURE_NAME = 'demo_eval_score_eval'", files=("score_from_task.gin",))
    assert scored.eval_data is not None and scored.eval_data.split == "test"


def test_a_configuration_with_all_of_it_survives_json():
    config = load("get_checkpoint_iterator.stop_after = 7", files=("infer.gin",))
    assert type(config).from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("params", "files", "part"),
    [
        (("Bitransformer.decode.sampling_keep_top_k = 0",), (), "sampling_keep_top_k"),
        (("beam_search.stop_early = False",), (), "beam_search.stop_early"),
        (("sample_autoregressive.max_steps = 3",), (), "sample_autoregressive.max_steps"),
        (("clean_decodes.eos_id = 2",), (), "clean_decodes.eos_id"),
        (("decode_from_file.repeats = 0",), ("infer.gin",), "decode_from_file.repeats"),
        (("run.mode = 'infer'",), (), "decode_from_file.input_filename"),
        (
            ("score_from_strings.score_postprocess_fn = @save_scores_to_tfrecords",),
            ("score_from_file.gin",),
            "score_from_strings.score_postprocess_fn",
        ),
    ],
)
def test_what_jax_does_not_do_is_refused_by_its_binding(params, files, part):
    with pytest.raises(UserError, match=part):
        load(*params, files=files)
