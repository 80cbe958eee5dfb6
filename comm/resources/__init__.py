"""What this host has for a rank: memory, cores, and blocks for results that are used again."""
