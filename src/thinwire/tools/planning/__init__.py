"""Predicts memory, bytes and times of an ExpertParallel before it exists: `thinwire plan`."""
