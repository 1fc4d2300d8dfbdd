"""Parameters and optimizer slots of a T5: their names in every format, shapes and axes."""
