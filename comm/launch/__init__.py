"""How a process becomes a rank: launchers' variables, rank tables, process groups."""
