"""Torch-free stand-ins for a model, behind the real worker loop, sockets and ring."""
