"""Gives every Estimator one seed, for runs whose numbers a test depends on.

Mesh TensorFlow has no gin parameter for it. The command imports this file
(`--module_import=seeded`).
"""

from tensorflow_estimator.python.estimator.tpu import tpu_config

tpu_config.RunConfig.tf_random_seed = 2
