"""Whether context parallelism is exact on this machine: awkward cases, simulated and real ranks, against float64;
and whether the checks would notice if it were not: planted faults."""

from deltaspan.verify.mutants import run_mutants
from deltaspan.verify.report import Report, Row
from deltaspan.verify.suite import run_suite

__all__ = ["Report", "Row", "run_mutants", "run_suite"]
