"""Work on other people's machines: jobs on Vertex AI, launchers, and experiment trackers."""
