def build() -> None:
    """build."""
