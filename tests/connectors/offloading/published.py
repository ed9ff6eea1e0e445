"""ARC and S3-FIFO transcribed from their papers, one key at a time, with plain lists. Slow, and
without anything that a tier needs besides: transfers, removal, many keys."""


class PublishedARC:
    """Figure 4 of Megiddo and Modha (FAST 2003). Lists have the least recently used key first."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []

    def request(self, x: bytes) -> None:
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if x in t1 or x in t2:  # case I
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:  # case II
            delta = 1.0 if len(b1) >= len(b2) else len(b2) / len(b1)
            self.p = min(self.p + delta, c)
            self.replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:  # case III
            delta = 1.0 if len(b2) >= len(b1) else len(b1) / len(b2)
            self.p = max(self.p - delta, 0)
            self.replace(x)
            b2.remove(x)
            t2.append(x)
        else:  # case IV
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    self.replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(b1) < c:
                total = len(t1) + len(t2) + len(b1) + len(b2)
                if total >= c:
                    if total == 2 * c:
                        b2.pop(0)
                    self.replace(x)
            t1.append(x)

    def replace(self, x: bytes) -> None:
        t1 = self.t1
        if t1 and ((x in self.b2 and len(t1) == self.p) or len(t1) > self.p):
            self.b1.append(t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


class PublishedS3FIFO:
    """Algorithm 1 of Yang et al. (SOSP 2023). Lists have the oldest key first. An object's count is
    reset when it moves to the main queue, as the text says."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.small: list[bytes] = []
        self.main: list[bytes] = []
        self.ghost: list[bytes] = []
        self.freq: dict[bytes, int] = {}

    def request(self, x: bytes) -> None:
        if x in self.small or x in self.main:
            self.freq[x] = min(self.freq[x] + 1, 3)
            return
        while len(self.small) + len(self.main) >= self.size:
            if len(self.small) >= 0.1 * self.size:
                self.evict_small()
            else:
                self.evict_main()
        if x in self.ghost:
            self.ghost.remove(x)
            self.main.append(x)
        else:
            self.small.append(x)
        self.freq[x] = 0

    def evict_small(self) -> None:
        while self.small:
            t = self.small.pop(0)
            if self.freq[t] > 1:
                self.freq[t] = 0
                self.main.append(t)
            else:
                self.ghost.append(t)
                if len(self.ghost) > self.size:
                    self.ghost.pop(0)
                return

    def evict_main(self) -> None:
        while self.main:
            t = self.main.pop(0)
            if self.freq[t] == 0:
                return
            self.freq[t] -= 1
            self.main.append(t)
