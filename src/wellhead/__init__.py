"""wellhead."""
