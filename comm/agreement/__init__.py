"""How ranks find out who is lost, and meet again without them."""
