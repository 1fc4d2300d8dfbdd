"""The Mesh TensorFlow dialect: gin in, a run with provenance out."""
