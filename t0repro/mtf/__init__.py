"""The Mesh TensorFlow stack: patches for a current TensorFlow, hooks, and how a run starts."""
