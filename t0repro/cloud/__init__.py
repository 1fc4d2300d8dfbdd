"""Work on other people's machines: jobs on Vertex AI, batch engines, and experiment trackers."""
