"""thinwire in other frameworks: a module each, imported only by those who use that framework."""
