def inspect() -> None:
    """inspect."""
