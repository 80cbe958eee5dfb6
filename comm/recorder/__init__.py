"""What every call leaves behind: the flight recorder's entries."""
