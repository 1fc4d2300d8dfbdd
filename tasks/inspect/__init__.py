"""What `t0repro tasks` ls, show and check compute, and how it is printed."""
