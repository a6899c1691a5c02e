"""The only room that touches torch.distributed."""
