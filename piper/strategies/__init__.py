"""Ready-made strategies and pipeline schedules, built only from public directives."""

from piper.strategies.action import Action
from piper.strategies.builder import Row, Schedule, folded, looped, straight
from piper.strategies.csv_table import from_csv, to_csv
from piper.strategies.mesh_strategy import MeshLayout, mesh, schedule_named
from piper.strategies.replicas.uneven import uneven
from piper.strategies.schedules.breadth_first import breadth_first
from piper.strategies.schedules.dualpipe import dualpipe
from piper.strategies.schedules.dualpipev import dualpipev, eight_phases
from piper.strategies.schedules.gpipe import gpipe
from piper.strategies.schedules.interleaved import interleaved
from piper.strategies.schedules.one_f_one_b import one_f_one_b
from piper.strategies.schedules.v_half import v_half
from piper.strategies.schedules.zb_h1 import zb_h1
from piper.strategies.schedules.zb_v import zb_v
from piper.strategies.timing import Timing, timed

__all__ = [
    "Action",
    "MeshLayout",
    "Row",
    "Schedule",
    "Timing",
    "breadth_first",
    "dualpipe",
    "dualpipev",
    "eight_phases",
    "folded",
    "from_csv",
    "gpipe",
    "interleaved",
    "looped",
    "mesh",
    "one_f_one_b",
    "schedule_named",
    "straight",
    "timed",
    "to_csv",
    "uneven",
    "v_half",
    "zb_h1",
    "zb_v",
]
