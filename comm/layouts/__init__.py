"""Where the parts of a tensor lie, and how it gets from one layout to another."""
