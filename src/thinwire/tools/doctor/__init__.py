"""Checks what this machine has and what works, and says why and what to do: `thinwire doctor`."""
