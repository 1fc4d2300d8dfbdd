"""How a run is sharded: which device holds and computes which part, on one device or many."""
