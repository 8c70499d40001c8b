"""The Hopper tier, sm_90: kernels in Gluon for K = V = 128 and bf16 operands under `unit_keys`; the forward so far."""
