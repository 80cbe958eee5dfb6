"""Memory that every rank can write into: what gives it, by device and kind of rank."""
