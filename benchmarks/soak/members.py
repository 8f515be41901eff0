"""The functions of the soak: members of eight families of real models, and the changes by their authors."""

from collections.abc import Sequence
from random import Random
from typing import Literal

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import ones_like, tensor

from benchmarks.families import Family, as_tensors
from benchmarks.openloop import Target
from benchmarks.soak.verdicts import History, Version
from benchmarks.wire import END, binary_request
from overwinter.api.client import Client
from overwinter.core.errors import DeadlineError
from overwinter.core.tensor import BYTES, pack_bytes
from overwinter.core.tensor import Tensor as Named

MODELS = ("mlp", "textcnn", "dssm", "lstm", "mobilenet-v2", "minilm", "distilbert", "resnet50")
BATCHED = {"mlp", "lstm", "minilm", "resnet50"}
"""The models whose members allow batches, so that they share runs; the others' answers equal plain PyTorch bit
for bit.
"""
MAX_BATCH = 4
TENANTS = ("north", "south", "east")
TOKENS = 16
ROWS = 2
"""The different inputs of each function, so that an answer to another request is noticed."""
KEEP_ALIVE_S = (None, 0.0, None, 2.0)
OWN_EVERY = 6
"""One in this many members has separate workers (`isolation = "function"`), and another one refuses late requests."""
SLO_MS = 1000.0
TIMEOUT_S = 30.0
STEEPNESS = 3
"""The share of a function among the requests is a random number to this power."""
RATES_KEPT_S = 20.0
"""How long functions are called at the same rates."""
BURST = 0.03
"""The share of moments at which BURST_SIZE requests to members of one family arrive at once."""
BURST_SIZE = 8
FACTOR_HANDLER = """
def setup(assets):
    return int(assets["factor"])

def preprocess(inputs, state):
    return dict(inputs)

def postprocess(outputs, inputs, state):
    return {name: tensor * state for name, tensor in outputs.items()}
"""
TOKENIZER_HANDLER = """
import torch
from tokenizers import Tokenizer

INPUTS = [{"name": "text", "datatype": "BYTES", "shape": ["batch"]}]

def setup(assets):
    return Tokenizer.from_str(assets["tokenizer.json"].decode())

def preprocess(inputs, state):
    ids = torch.tensor([state.encode(text.decode()).ids for text in inputs["text"]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
"""
HANDLERS = {"textcnn": FACTOR_HANDLER, "lstm": FACTOR_HANDLER, "minilm": TOKENIZER_HANDLER}
"""The models with a handler; its answers are wrong with another member's state."""
IDS = 97
"""The ids of a member's tokenizer; the smallest vocabulary has more."""
CHANGES: dict[str, tuple[str, ...]] = {
    "absent": ("deploy",),
    "unloaded": ("load", "load", "deploy", "remove"),
    "present": ("deploy", "deploy", "remove", "unload"),
}
"""The possible changes of a function in each state; a deploy of a deployed function is an update."""


class Member:
    """One function. Its versions have different heads. With a handler, it has a factor or a tokenizer of its own."""

    def __init__(self, family: Family, order: int, tenant: str, pool: bool) -> None:
        """Create it; `order`: its index within the family; `pool`: it runs on devices, without a handler."""
        self.name = f"{family.name}-{order:03}"
        self.tenant = tenant
        self.state: Literal["absent", "present", "unloaded"] = "absent"
        refuses_late = order % OWN_EVERY == 1
        self.history = History(may_be_late=not refuses_late)
        self.history.gone.begin()
        self._family = family
        self._handler = None if pool else HANDLERS.get(family.name)
        self._words = {f"w{word}": 1 + (word + order) % IDS for word in range(ROWS * TOKENS)}
        self._factor = order + 2 if self._handler == FACTOR_HANDLER else None
        self._exact = pool or family.name not in BATCHED
        self._settings = {
            "keep_alive_s": KEEP_ALIVE_S[order % len(KEEP_ALIVE_S)],
            "timeout_s": TIMEOUT_S,
            "max_batch": 1 if self._exact else MAX_BATCH,
            "isolation": "function" if order % OWN_EVERY == 0 else "family",
            "device": "pool" if pool else "cpu",
        }
        if refuses_late:
            self._settings |= {"slo_ms": SLO_MS, "late": "refuse"}
        self._version = 0

    def requests(self) -> list[bytes]:
        """Return a request for each input."""
        return [binary_request(self.name, self._input(row)) for row in range(ROWS)]

    def targets(self, payload: int) -> list[Target]:
        """Return how to call it with each input; the first row is the plan's payload of this number."""
        heads = [request.partition(END)[0] + END for request in self.requests()]
        return [Target(head, payload + row, b"", not self._exact) for row, head in enumerate(heads)]

    def change(self, what: str, client: Client, variant: int) -> None:
        """Make one of CHANGES; raise OverwinterError if the node refuses."""
        client = client.for_tenant(self.tenant)
        if what == "deploy":
            self._deploy(client, variant)
        elif what == "remove":
            self._remove(client)
        elif what == "unload":
            self.history.unloaded.begin()
            client.unload(self.name)
            self.state = "unloaded"
        else:
            client.load(self.name)
            self._loaded()

    def _deploy(self, client: Client, variant: int) -> None:
        """Deploy a new version, and remove the previous one once the new one answers."""
        family = self._family
        family.vary(family.head(), variant)
        made = family.packaged(self.name, self._handler, assets=self._assets(), tenant=self.tenant, **self._settings)
        version = Version([self._answer(row) for row in range(ROWS)], exact=self._exact)
        older = list(self.history.versions)
        self.history.versions.append(version)
        version.served.begin()
        try:
            uploaded = made.upload(client)
        except DeadlineError:
            # The client stopped waiting: the version may become the default one or not.
            raise
        except BaseException:
            # It never becomes the default version.
            self.history.versions.remove(version)
            raise
        for each in older:
            each.served.end()
        before, self._version = self._version, uploaded.version
        self.state = "present"
        self._loaded()
        if before:
            self.history.gone.begin()
            client.remove(self.name, before)
        self.history.gone.end()

    def _remove(self, client: Client) -> None:
        self.history.gone.begin()
        client.remove(self.name)
        for each in self.history.versions:
            each.served.end()
        self._version = 0
        self.state = "absent"
        self._loaded()

    def _text(self, row: int) -> list[str]:
        return list(self._words)[row * TOKENS : (row + 1) * TOKENS]

    def _input(self, row: int) -> list[Named]:
        if self._handler == TOKENIZER_HANDLER:
            return [Named("text", BYTES, (1,), pack_bytes([" ".join(self._text(row)).encode()]))]
        return as_tensors(self._family.one(row))

    def _answer(self, row: int) -> bytes:
        """Return the answer of plain PyTorch, without a tokenizer or a handler's code."""
        if self._handler != TOKENIZER_HANDLER:
            return self._family.answer(row, self._factor)
        ids = tensor([[self._words[word] for word in self._text(row)]])
        return self._family.answer(inputs={"input_ids": ids, "attention_mask": ones_like(ids)})

    def _assets(self) -> dict[str, bytes] | None:
        if self._handler == TOKENIZER_HANDLER:
            tokenizer = Tokenizer(WordLevel(self._words, unk_token="w0"))
            tokenizer.pre_tokenizer = WhitespaceSplit()
            return {"tokenizer.json": tokenizer.to_str().encode()}
        return None if self._factor is None else {"factor": str(self._factor).encode()}

    def _loaded(self) -> None:
        self.state = "present" if self.state == "unloaded" else self.state
        self.history.unloaded.end()


def make_members(
    count: int, models: tuple[str, ...], small: bool, pool: bool = False
) -> tuple[list[list[Member]], list[Target], list[bytes]]:
    """Return the members of all families, equally many of each, with the plan's targets (ROWS each) and payloads."""
    families: list[list[Member]] = []
    targets: list[Target] = []
    payloads: list[bytes] = []
    for place, model in enumerate(models):
        family = Family(model, tokens=TOKENS, small=small)
        wanted = range(place, count, len(models))
        tenant = TENANTS[place % len(TENANTS)]
        families.append([Member(family, order, tenant, pool) for order in range(len(wanted))])
        for member in families[-1]:
            targets += member.targets(len(payloads))
        payloads += [request.partition(END)[2] for request in families[-1][0].requests()]
    return families, targets, payloads


def arrivals(seconds: float, rate: float, families: Sequence[int], random: Random) -> list[tuple[float, int]]:
    """Return the arrivals: `rate` requests per second in total, each function at a rate that changes from time to time.

    Some functions are called often, most seldom, so that some have no worker at times; sometimes many of a family are
    called at once. `families`: the number of members of each.
    """
    found: list[tuple[float, int]] = []
    moments = rate / (1 + BURST * (BURST_SIZE - 1))
    members = [range(sum(families[:at]), sum(families[: at + 1])) for at in range(len(families))]
    at, redraw, weights = random.expovariate(moments), 0.0, [1.0]
    while at < seconds:
        if at >= redraw:
            weights = [random.expovariate(1.0) ** STEEPNESS for _ in range(sum(families))]
            redraw = at + RATES_KEPT_S
        called = random.choices(range(sum(families)), weights)
        if random.random() < BURST:
            [siblings] = [each for each in members if called[0] in each]
            called = random.choices(siblings, k=BURST_SIZE)
        found += [(at, ROWS * member + random.randrange(ROWS)) for member in called]
        at += random.expovariate(moments)
    return found
