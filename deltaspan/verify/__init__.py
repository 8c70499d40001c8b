"""Whether context parallelism is exact on this machine: awkward cases, simulated and real ranks, against float64."""

from deltaspan.verify.report import Report, Row
from deltaspan.verify.suite import run_suite

__all__ = ["Report", "Row", "run_suite"]
