"""The Mesh TensorFlow stack: what a current TensorFlow took away, and its command."""
