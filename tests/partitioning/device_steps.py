"""Runs train steps on the devices of a process, for the scripts that compare layouts."""

import jax

from t0repro.model.t5 import initial_parameters
from t0repro.partitioning.devices import put
from t0repro.training.t5_model import T5Model
from t0repro.training.train_state import new_train_state
from t0repro.training.train_step import jit_train_step, make_train_step, stack_builtin_state


def run_steps(model, optimizer, schedule, batches, partitioning, *, microbatches, stacks=True):
    """The loss of each step, the last state, and the compiled step.

    With `stacks`, scanned layers are held as a trainer holds them.
    """
    several = partitioning if partitioning.mesh.size > 1 else None
    state = new_train_state(initial_parameters(model, jax.random.key(0)), optimizer)
    state = stack_builtin_state(T5Model(model), state) if stacks else state
    if several:
        state = jax.tree.map(put, state, several.shardings(state))
    step = make_train_step(
        model,
        optimizer,
        schedule,
        num_microbatches=microbatches,
        dropout_key=jax.random.key(1),
        partitioning=several,
    )
    put_batch = several.put_batch if several else jax.device_put
    with partitioning.active():
        compiled = (
            jit_train_step(step, state, several).lower(state, put_batch(batches[0])).compile()
        )
    losses = []
    for batch in batches:
        state, values = compiled(state, put_batch(batch))
        losses.append(float(values["loss"]))
    return losses, state, compiled
