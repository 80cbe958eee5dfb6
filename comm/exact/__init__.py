"""Collectives that move values as they are, with torch.distributed's conventions."""
