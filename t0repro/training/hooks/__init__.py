"""What the training loop runs between steps."""
