"""Device code. Each file holds a kernel, its launcher, and the plain-torch reference that it must equal.

Nothing here knows of processes, groups or transports.
"""
