"""Adapters to frameworks; each module imports its own only when it is used."""
