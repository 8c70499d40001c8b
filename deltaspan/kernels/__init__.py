"""The machines: the stages of the operation, once per tier, and the choice between tiers."""
