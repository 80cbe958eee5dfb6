"""What is here, what works, what does not and why, and what to do about it: `thinwire doctor`."""
