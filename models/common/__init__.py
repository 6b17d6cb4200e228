"""What families share: configuration, published tensors, plans to pack them, formulas and stages in PyTorch."""
