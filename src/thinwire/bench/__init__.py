"""What `thinwire bench` measures, and how it is shown."""
