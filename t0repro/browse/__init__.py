"""The prompt bench: prompts and their rows in a browser, edited and scored as one types."""
