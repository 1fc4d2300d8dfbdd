"""A T5X extension, ported: a model, a trainer, a metric and an action (docs/trainer.md).

It fine-tunes on partly wrong labels. The loss limits the cost of a wrong label, the trainer skips
updates with a large gradient norm, the metric is the log-probability of the least probable target,
and the action stops training when the model has learned even that target.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import optax

from t0repro.training import losses, models, trainer
from t0repro.training import metric_classes as metrics


@flax.struct.dataclass
class Lowest(metrics.Metric):
    value: jax.Array

    @classmethod
    def from_model_output(cls, values, mask):
        return cls(jnp.min(jnp.where(mask, values, jnp.inf)))

    def merge(self, other):
        return type(self)(jnp.minimum(self.value, other.value))

    def compute(self):
        return self.value


class RobustModel(models.EncoderDecoderModel):
    def __init__(self, *args, q=0.5, **kwargs):
        super().__init__(*args, **kwargs)
        self._q = q

    def loss_fn(self, params, batch, dropout_rng):
        logits = self._compute_logits(params, batch, dropout_rng)
        targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
        one_hot = jax.nn.one_hot(targets, logits.shape[-1])
        log_p = -losses.cross_entropy_with_logits(logits, one_hot, z_loss=0.0)[0]
        costs = (1.0 - jnp.exp(self._q * log_p)) / self._q  # at most 1 / q, however wrong
        loss = jnp.sum(costs * weights) / self._loss_normalizing_factor
        computed = self._compute_metrics(logits, targets, weights, loss)
        return loss, {**computed, "lowest_log_prob": Lowest.from_model_output(log_p, weights > 0)}

    def predict_batch(self, params, batch, rng=None):
        tokens = super().predict_batch(params, batch, rng)
        sentinels = tokens >= self.output_vocabulary.vocab_size - 100
        return jnp.where(sentinels, self.output_vocabulary.unk_id, tokens)


class CarefulTrainer(trainer.Trainer):
    def __init__(self, *args, longest=10.0, **kwargs):
        super().__init__(*args, **kwargs)
        self._longest = longest

    @functools.cached_property
    def _partitioned_train_step(self):
        def train_step(state, batch):
            rng, rate = self._get_step_rng(state.step), self._learning_rate_fn(state.step)
            gradients, summary, _ = trainer.accumulate_grads_microbatched(
                self._model, state, batch, rng, self._num_microbatches
            )
            applied = optax.tree.norm(gradients) <= self._longest
            gradients = jax.tree.map(lambda x: jnp.where(applied, x, 0.0), gradients)
            summary = {**summary, "updates_left_out": metrics.Sum.from_model_output(~applied)}
            computer = self._weight_metrics_computer
            return trainer.apply_grads(state, gradients, summary, rate, computer)

        axes = (self._train_state_axes, self._partitioner.data_partition_spec)
        outputs = (self._train_state_axes, None)
        return self._partitioner.partition(train_step, axes, outputs, donate_argnums=(0,))


class StopWhenLearned(trainer.BaseAction):
    def __init__(self, task, log_prob=-0.1):
        self._task, self._log_prob = task, log_prob

    def run(self, train_state, metrics_by_task):
        return metrics_by_task[self._task]["lowest_log_prob"].value > self._log_prob
