def doctor() -> None:
    """doctor."""
