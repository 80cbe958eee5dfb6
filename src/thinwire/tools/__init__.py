"""What the commands run; nothing that a program calls imports it."""
