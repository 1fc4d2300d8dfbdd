"""gin: its private state, its errors, what its files import, and its statements read as text."""
