"""Release statistics of private columns: counts, means, histograms, quantiles and bounds, each paid for.

`spending` takes the part of a budget that a statistic costs; `cells`, `ranks` and `ranges` define the
queries.
"""

from farthing.statistics.cells import count, histogram, mean
from farthing.statistics.ranges import bounds
from farthing.statistics.ranks import quantiles
from farthing.statistics.spending import Statistic

__all__ = ["Statistic", "bounds", "count", "histogram", "mean", "quantiles"]
