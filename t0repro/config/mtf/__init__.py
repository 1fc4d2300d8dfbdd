"""The Mesh TensorFlow dialect: gin in, a RunConfig with provenance out."""
