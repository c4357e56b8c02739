"""What the packages' tests, and those of users, share: real multi-process runs, counters, and the reading of imports.

Needs the extra `moe-core[testing]`.
"""

from moe_core.testing._counters import Count as Count
from moe_core.testing._counters import count_collectives as count_collectives
from moe_core.testing._counters import count_host_syncs as count_host_syncs
from moe_core.testing._imports import import_faults as import_faults
from moe_core.testing._ranks import RankFailed as RankFailed
from moe_core.testing._ranks import RanksTimedOut as RanksTimedOut
from moe_core.testing._ranks import run_ranks as run_ranks
