"""Shows that the two stacks compute the same: runs both on one job and compares the results."""
