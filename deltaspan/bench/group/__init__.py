"""A real group of ranks as it is, over NCCL or gloo: whether it is right, and how long it takes.

Every process of it runs the same; rank 0 gathers, judges, and writes the record.
"""
