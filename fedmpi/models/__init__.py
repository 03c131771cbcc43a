"""Networks. A model is a `torch.nn.Module` whose constructor takes shape, num_classes and settings."""
