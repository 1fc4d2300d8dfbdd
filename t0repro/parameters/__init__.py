"""A T5's parameters and optimizer slots: their names in every format, shapes and axes."""
