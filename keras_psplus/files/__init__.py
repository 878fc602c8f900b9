"""Files on disk: written whole or not at all, and checked by digests."""
