"""Quantised communication: each file joins the kernels of one operation to a transport."""
