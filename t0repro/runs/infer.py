"""Mode infer: reads a text file and writes the outputs to <output_filename>-<step>."""

from __future__ import annotations

from t0repro.config.configuration import Configuration
from t0repro.runs.loaded_model import generated_texts, loaded


def infer(configuration: Configuration) -> None:
    """Generates an output for each line of a file, at each chosen checkpoint."""
    from t0repro.evaluation import text_files
    from t0repro.evaluation.checkpoint_choice import chosen_checkpoints

    config = configuration.run
    assert config.infer is not None and config.sequence_length is not None
    lines, length = text_files.infer_inputs(config.infer), config.sequence_length["inputs"]
    vocabulary = configuration.vocabularies[0]
    inputs = text_files.encode_lines(lines, vocabulary, config.infer.eos_id, length)
    repeats = config.infer.repeats
    # As in Mesh TensorFlow, which pads the last batch with the first input, once per repeat.
    fill = repeats * (-(len(lines) // repeats) % config.batch_size)
    for model in loaded(configuration, chosen_checkpoints(config)):
        texts = generated_texts(configuration, model, inputs, length, fill)
        text_files.write_lines(f"{config.infer.output_filename}-{model.step}", texts)
