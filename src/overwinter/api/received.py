"""The bytes that a connection has received and not parsed, and where the next step of parsing ends."""

STEP_BYTES = 2 << 10
"""The most bytes of a head or of chunks that are parsed in one step."""
END = b"\r\n\r\n"
"""The end of a head, of trailers, and of a body that consists of chunks."""


class Received:
    """The bytes of one connection; false if there are none."""

    def __init__(self) -> None:
        self._data = b""
        self._taken = 0

    def __bool__(self) -> bool:
        return self._taken < len(self._data)

    def add(self, data: bytes) -> None:
        """Append what has arrived."""
        self._data = self._data[self._taken :] + data
        self._taken = 0

    def take(self, nbytes: int | None) -> bytes:
        """Take `nbytes`, the rest of a body; if None, the bytes up to the next end, but at most STEP_BYTES. The latter
        contain no second request, unless an end came in two pieces.
        """
        if nbytes is None:
            most = self._taken + STEP_BYTES
            found = self._data.find(END, self._taken, most)
            # A part of an end is left for the next step.
            end = most - len(END) + 1 if found < 0 else found + len(END)
        else:
            end = self._taken + nbytes
        data = self._data[self._taken : end]
        self._taken += len(data)
        return data

    def clear(self) -> None:
        """Discard all."""
        self._data = b""
        self._taken = 0
