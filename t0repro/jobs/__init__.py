"""Work around a run: auxiliary jobs and launching."""
