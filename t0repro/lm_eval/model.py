"""A checkpoint of any format as a model of lm-evaluation-harness: `--model t0repro`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

from t0repro.config.decoding import GREEDY
from t0repro.config.model import DType
from t0repro.errors import UserError, nearest_names
from t0repro.evaluation.engine import Engine
from t0repro.evaluation.generation import generate_tokens
from t0repro.evaluation.opened import attach_adapter, open_adapter_at, open_checkpoint
from t0repro.evaluation.pairs import collect_pairs
from t0repro.evaluation.selection import check_fits
from t0repro.progress import count_progress
from t0repro.tasks.vocabulary import named_vocabulary

EOS = ("targets", "inputs")


class T0ReproLM(LM):
    """Log-likelihoods and greedy outputs of a T5 checkpoint.

    Args:
      checkpoint: A checkpoint's path, in any format that t0repro converts.
      step: Which step to read; the latest by default.
      adapter: An adapter's checkpoint, or a folder of PEFT's, for which `checkpoint` is the base.
      vocabulary: The SentencePiece model without T5's sentinels; by default T5's own, or the one
        that T0REPRO_VOCAB names.
      eos: Which text ends with EOS. `targets` is T0's convention: a choice's score includes its
        EOS. `inputs` is that of the harness's `hf` model: its tokenizer adds EOS to the context,
        and its continuations have none.
      max_length: Maximum tokens of a context; longer ones are cut at the end, as in T0.
      max_gen_toks: Maximum tokens of an output if the task sets none.
      dtype: What activations are computed in.
      tokens_per_batch: Input tokens that are under way on a device at once; changes no score.
      batch_size, device, max_batch_size: Passed by the harness but not used, because batches are
        sized in tokens and use all devices.

    Raises:
      UserError: If the checkpoint or the vocabulary is missing, they do not fit together, or an
        argument is unknown.
    """

    def __init__(
        self,
        checkpoint: str | None = None,
        step: int | None = None,
        adapter: str | None = None,
        vocabulary: str | None = None,
        eos: Literal["targets", "inputs"] = "targets",
        max_length: int = 1024,
        max_gen_toks: int = 256,
        dtype: DType = "float32",
        tokens_per_batch: int | None = None,
        batch_size: Any = None,
        device: Any = None,
        max_batch_size: Any = None,
        **unknown: Any,
    ):
        del batch_size, device, max_batch_size
        super().__init__()
        where = "--model_args"
        if checkpoint is None:
            raise UserError("No checkpoint is named.", where=where, fix="Add checkpoint=PATH.")
        # Python's own error would end the harness with a traceback.
        if unknown:
            name = next(iter(unknown))
            known = (
                "checkpoint step adapter vocabulary eos max_length max_gen_toks dtype"
                " tokens_per_batch"
            )
            raise UserError(
                f"The model has no argument {name!r}.",
                where=where,
                fix=f"Nearest: {nearest_names(name, known.split())}.",
            )
        if eos not in EOS:
            raise UserError(f"Invalid eos={eos!r}.", where=where, fix=f"Give {' or '.join(EOS)}.")
        self._vocabulary = named_vocabulary(vocabulary)
        self._processor = self._vocabulary.processor()
        self._checkpoint = open_checkpoint(str(checkpoint), step, dtype)
        if adapter is not None:
            self._checkpoint = attach_adapter(self._checkpoint, open_adapter_at(str(adapter)))
        check_fits(
            self._vocabulary,
            self._checkpoint.model.config.vocab_size,
            self._checkpoint.path,
            self._checkpoint.folders,
        )
        # A continuation is never cut, since its score would be another text's.
        self._eos, self._lengths = eos, {"inputs": max_length, "targets": 1 << 30}
        self._max_gen_toks, self._tokens_per_batch = max_gen_toks, tokens_per_batch

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(Log-likelihood, whether greedy decoding gives it) of each (context, continuation).

        A context is encoded once for all of its continuations.
        """
        del disable_tqdm
        examples = [
            {
                "inputs": self._context(request.args[0]),
                "targets": self._continuation(request.args[1]),
            }
            for request in requests
        ]
        pairs = collect_pairs(examples, self._lengths)
        engine = Engine(
            self._checkpoint.params,
            self._checkpoint.model,
            misses=True,
            tokens_per_batch=self._tokens_per_batch,
        )
        scores, misses = np.zeros(len(pairs)), np.ones(len(pairs))
        with count_progress(len(pairs), "scoring", "pair", "scored") as advance:
            for found in engine.run(pairs, engine.plan(pairs)):
                scores[found.pairs], misses[found.pairs] = found.scores, found.misses
                advance(len(found.pairs))
        scores, misses = pairs.expand_to_examples(scores), pairs.expand_to_examples(misses)
        return [(float(score), not miss) for score, miss in zip(scores, misses, strict=True)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Refuses: under an encoder-decoder, a text without a context has no likelihood.

        Raises:
          UserError: Always.
        """
        del requests, disable_tqdm
        raise UserError(
            "t0repro scores a text only given an input.",
            where="output_type: loglikelihood_rolling",
            fix="Leave tasks that measure perplexity out.",
        )

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The greedy output for each context, cut before the first of its stop sequences.

        Raises:
          UserError: If a task asks for sampling or for several beams.
        """
        del disable_tqdm
        outputs = [""] * len(requests)
        # Requests that may generate equally many tokens are decoded together.
        limits = [self._limit(request.args[1]) for request in requests]
        for limit in sorted(set(limits)):
            members = [number for number, own in enumerate(limits) if own == limit]
            tokens = generate_tokens(
                self._checkpoint.params,
                self._checkpoint.model,
                [self._context(requests[number].args[0]) for number in members],
                GREEDY,
                length=limit,
                inputs_length=self._lengths["inputs"],
            )
            for number, ids in zip(members, tokens, strict=True):
                outputs[number] = self._text(ids, requests[number].args[1].get("until") or ())
        return outputs

    def get_model_info(self) -> dict[str, Any]:
        """The harness's record of the model: path, step, digest of parameters, EOS convention."""
        opened = self._checkpoint
        return {
            "model_sha": opened.digest,
            "checkpoint": opened.path,
            "step": opened.step,
            "eos": self._eos,
        }

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer in the harness's cache of requests."""
        return f"{self._vocabulary.address} eos={self._eos}"

    def _context(self, text: str) -> np.ndarray:
        tokens = self._processor.encode(text)
        if self._eos == "inputs":
            # As in transformers, truncation leaves room for EOS.
            tokens = [*tokens[: self._lengths["inputs"] - 1], self._vocabulary.eos_id]
        return np.array(tokens, np.int32)

    def _continuation(self, text: str) -> np.ndarray:
        # The space that the harness puts before a continuation is not part of the target.
        tokens = self._processor.encode(text.removeprefix(" "))
        if self._eos == "targets":
            tokens = [*tokens, self._vocabulary.eos_id]
        return np.array(tokens, np.int32)

    def _limit(self, options: Mapping[str, Any]) -> int:
        # With temperature 0 a task asks for the greedy output, whatever do_sample says.
        sampled = options.get("do_sample") and options.get("temperature", 1.0) > 0
        if sampled or options.get("num_beams", 1) > 1:
            raise UserError(
                "A task asks for sampling or for several beams; this model decodes greedily.",
                where=f"generation_kwargs: {dict(options)}",
                fix="Leave the task out, or pass --gen_kwargs do_sample=False.",
            )
        # The harness's own models take any of these names.
        for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
            if name in options:
                return int(options[name])
        return self._max_gen_toks

    def _text(self, tokens: Sequence[int], until: str | Sequence[str]) -> str:
        size = self._processor.vocab_size()
        if self._vocabulary.eos_id in tokens:
            tokens = tokens[: tokens.index(self._vocabulary.eos_id)]
        # The embedding has more rows than the vocabulary has pieces.
        text = self._processor.decode([token for token in tokens if token < size])
        for stop in [until] if isinstance(until, str) else until:
            # Python refuses to split a text at "".
            if stop:
                text = text.split(stop)[0]
        return text
