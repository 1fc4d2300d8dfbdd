"""Distills one T5 into another with a model and a trainer of one's own (docs/trainer.md).

The student keeps a running mean of the divergence in a flax mutable, which checkpoints include, and
the trainer clips the gradient norm in its own train step.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from t0repro.config.data import SeqioDataConfig
from t0repro.data.train_data import SeqioTrainBatches
from t0repro.model.t5 import initial_parameters
from t0repro.training import trainer
from t0repro.training.metric_classes import Average, AveragePerStep
from t0repro.training.models import BaseModel
from t0repro.training.train_state import TrainState


class Student(BaseModel):
    def __init__(self, module, optimizer_def, teacher_params):
        super().__init__(optimizer_def)
        self.module, self.teacher_params = module, teacher_params

    def get_initial_variables(self, rng, input_shapes, input_types=None):
        params = initial_parameters(self.module, rng)
        return {"params": params, "running": {"gap": jnp.float32(0.0)}}

    def loss_fn(self, params, batch, dropout_rng, flax_mutables=None):
        ours = jax.nn.log_softmax(self.module.apply({"params": params}, batch))
        theirs = jax.nn.log_softmax(self.module.apply({"params": self.teacher_params}, batch))
        real = batch["targets"] > 0
        gaps = jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1)  # nats, [batch, length]
        gap = Average.from_model_output(gaps, real)
        loss = gap.total
        running = 0.9 * flax_mutables["running"]["gap"] + 0.1 * gap.compute()
        metrics = {"loss": AveragePerStep.from_model_output(loss), "gap": gap}
        return loss, (metrics, {"running": {"gap": running}})


class ClippingTrainer(trainer.Trainer):
    @functools.cached_property
    def _partitioned_train_step(self):
        def train_step(state, batch):
            rng, rate = self._get_step_rng(state.step), self._learning_rate_fn(state.step)
            gradients, metrics, mutables = trainer.accumulate_grads_microbatched(
                self._model, state, batch, rng, self._num_microbatches
            )
            scale = jnp.minimum(1.0, 1.0 / optax.tree.norm(gradients))
            gradients = jax.tree.map(lambda x: x * scale, gradients)
            return trainer.apply_grads(
                state, gradients, metrics, rate, None, {"flax_mutables": mutables}
            )

        axes = (self._train_state_axes, None)
        return self._partitioner.partition(train_step, out_axis_resources=axes, donate_argnums=0)


def imitate(module, teacher_params, summary_dir, steps):
    data = SeqioDataConfig("demo_synthetic_glue_mrpc_paraphrase", {"inputs": 64, "targets": 8},
                         "train", batch_size=8, shuffle=True, seed=0)  # fmt: skip
    source = SeqioTrainBatches(data, save_dataset=False, resumed=False)
    model = Student(module, optax.adam(1e-2), teacher_params)
    state = TrainState.create(
        model.optimizer_def, model.get_initial_variables(jax.random.key(1), {})
    )
    options = (model, state, None, [], summary_dir, None, jax.random.key(2), lambda step: 1e-2, 2)
    with ClippingTrainer(*options) as training:
        batches = iter(source.open(0, None))
        values = [training.train(batches, steps).result() for _ in range(2)]
        return training.train_state, values
