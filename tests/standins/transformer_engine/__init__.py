"""A stand-in for NVIDIA's Transformer Engine 2.9: the interface that accel calls, on torch's own layers."""
