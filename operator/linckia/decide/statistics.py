"""Running statistics of times: of their logarithms, because times of one kind differ by factors, not by seconds."""

import math
from dataclasses import dataclass

SHORTEST_SECONDS = 1e-6

# How much the times of one kind are taken to differ before they have been seen (a factor of e, as broad as real stages
# get), and how many sightings that belief is worth.
PRIOR_DEVIATION = 1.0
PRIOR_COUNT = 3


@dataclass(frozen=True)
class LogStatistics:
    """``count`` values with the mean and the summed squared deviations of their natural logarithms.

    Example: after 1 s and 100 s ``usual`` is 10 s.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def usual(self) -> float:
        """The geometric mean, in seconds."""
        return math.exp(self.mean)

    @property
    def deviation(self) -> float:
        """Standard deviation of the logarithms; the fewer values there are, the nearer to the prior."""
        return math.sqrt((PRIOR_COUNT * PRIOR_DEVIATION**2 + self.squares) / (PRIOR_COUNT + self.count))

    def beyond(self, logarithm: float) -> float:
        """Seconds that lie so far above the usual: by the factor exp(``logarithm``)."""
        return math.exp(min(self.mean + logarithm, 700.0))  # math.exp raises above 709

    def with_value(self, seconds: float) -> "LogStatistics":
        """Welford's update, one value at a time."""
        value = math.log(max(seconds, SHORTEST_SECONDS))
        count = self.count + 1
        off = value - self.mean
        mean = self.mean + off / count
        return LogStatistics(count, mean, self.squares + off * (value - mean))
