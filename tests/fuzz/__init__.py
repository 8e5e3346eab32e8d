"""Random calls against the oracle, from plain seeds: `python -m tests.fuzz --minutes 10 --seed 1`."""
