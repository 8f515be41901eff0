"""What does the node hold of one zygote?"""

import os
import subprocess

from overwinter.core.ids import WorkerId
from overwinter.node.bodies import BodyProcess
from overwinter.worker.channel import Channel, pair
from overwinter.worker.messages import FromZygote, Up


class ZygoteProcess:
    """One zygote: its channel, its bodies, and the process if the node itself started it."""

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        self.process = process
        self.up: Up | None = None
        self.smaps: int | None = None
        self.bodies: dict[WorkerId, BodyProcess] = {}
        here, self.there = pair()
        here.setblocking(False)
        self.channel: Channel[FromZygote] = Channel(here, FromZygote)  # type: ignore[arg-type]
        # Bodies speak here too when they begin, and know no process id by which the node could find them.
        self.channel.ask_who_sends()

    def close(self) -> None:
        """Close what the node holds of it."""
        self.channel.close()
        if self.smaps is not None:
            os.close(self.smaps)
