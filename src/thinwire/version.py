"""The version, read by packaging and compared between ranks."""

VERSION = "0.1.0"
