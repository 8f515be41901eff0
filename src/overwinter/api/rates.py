"""A rate limiter: a token bucket that holds the tokens of one second, but at least one."""


class Rate:
    """Allows `per_s` events per second, and after a pause `per_s` at once, but at least one."""

    __slots__ = ("_at", "_left", "per_s")

    def __init__(self, per_s: float) -> None:
        self.per_s = per_s
        self._left = max(1.0, per_s)
        self._at = 0.0

    def take(self, now: float) -> float:
        """Take a token and return 0; without a token, return the seconds until the next one."""
        left = min(max(1.0, self.per_s), self._left + max(0.0, now - self._at) * self.per_s)
        self._at = now
        if left >= 1.0:
            self._left = left - 1.0
            return 0.0
        self._left = left
        return (1.0 - left) / self.per_s
