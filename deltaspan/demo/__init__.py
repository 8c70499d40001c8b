"""A first sight of the project: real ranks train a small model on real text, checked against one rank and FP64."""

from deltaspan.demo.processes import RankFailed
from deltaspan.demo.report import opening, report
from deltaspan.demo.run import DemoRun, prepare, run_demo
from deltaspan.demo.settings import DemoSettings

__all__ = ["DemoRun", "DemoSettings", "RankFailed", "opening", "prepare", "report", "run_demo"]
