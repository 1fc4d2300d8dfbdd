"""What people read of tasks: the list, examples of one task, verdicts, and their tables."""
