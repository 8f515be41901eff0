"""Kind 3: random manifests and pipelines. An accepted function must answer, and must not be found after its removal."""

import json
from random import Random
from typing import Any

import msgspec

from benchmarks.fuzz.kind import ignoring_errors, judged
from benchmarks.hostile import mutation
from benchmarks.hostile.attacked_node import AttackedNode
from benchmarks.hostile.exchange import Reply, ask, connect, exchange, receive, request, tenant_header
from benchmarks.hostile.functions import DEPLOY_S, Functions, infer_request, source, upload_blobs
from overwinter.core.function import Settings
from overwinter.core.profiling import ProfileOptions
from overwinter.store.blocks import address_of
from overwinter.store.manifest import encode_manifest

SETTINGS = tuple(field.name for field in msgspec.structs.fields(Settings))
NUMERIC = tuple(each for each in SETTINGS if each == "slo_ms" or type(getattr(Settings(), each)) in (int, float))
BOUNDS = (*mutation.NUMBERS, *mutation.OTHERS, *mutation.LARGE)
ASK_S = 10.0
BURST = 40


class Manifests:
    """Mutants of two manifests whose blobs are stored, and pipelines over deployed functions."""

    name = "manifests"
    cases = (
        "mutated",
        "setting",
        "least setting",
        "largest settings",
        "settings together",
        "specs",
        "blocks",
        "pipeline",
        "cycle",
        "msgpack",
        "text",
        "layout",
    )

    def __init__(self, attacked: AttackedNode, functions: Functions) -> None:
        self._attacked = attacked
        self._functions = functions
        self._valid: dict[str, dict[str, Any]] = {}

    def prepare(self) -> None:
        client = self._attacked.node.client
        self._functions.deploy(client, "first", 2.0, tenant="pipes")
        self._functions.deploy(client, "second", 3.0, tenant="pipes")
        for name, handler in (("bare", None), ("handled", source("words"))):
            made = self._functions.package(name, 5.0, handler=handler, tenant="mutants", assets=None)
            upload_blobs(self._attacked.port, made)
            self._valid[name] = json.loads(encode_manifest(made.manifest))

    def run(self, case: str, rng: Random) -> None:
        if case in ("pipeline", "cycle"):
            self._pipeline(case, rng)
            return
        manifest = json.loads(json.dumps(self._valid[rng.choice(list(self._valid))]))
        manifest["name"] = name = f"mutant-{rng.randrange(4)}"
        kind, body = "application/json", b""
        match case:
            case "text":
                body = mutation.content(json.dumps(manifest).encode(), rng)
            case "msgpack":
                kind, body = "application/msgpack", mutation.content(msgspec.msgpack.encode(manifest), rng)
            case "layout":
                self._set_layout(manifest, rng)
            case "mutated":
                manifest = mutation.tree(manifest, rng)
            case _:
                _change(manifest, case, rng)
        self._register(name, body or json.dumps(manifest).encode(), kind, rng)

    def _set_layout(self, manifest: dict[str, Any], rng: Random) -> None:
        """Replace its first block by one whose layout has very many dimensions, weights or digits."""
        count = rng.choice((1000, 100_000, 1_000_000))
        text = rng.choice(
            (b"float32[" + b"1," * count + b"1]\n", b"float32[1]\n" * count, b"float32[" + b"9" * count + b"]\n")
        )
        block = manifest["blocks"][0]
        data = bytes(block[1]) + text + len(text).to_bytes(4, "little")
        block[0], block[1] = address_of(data), len(data)
        exchange(
            self._attacked.port, request("PUT", f"/overwinter/v1/blocks/{block[0]}", data, tenant_header("mutants"))
        )

    def _register(self, name: str, body: bytes, kind: str, rng: Random) -> None:
        sent = request("POST", "/overwinter/v1/functions", body, f"content-type: {kind}\r\n{tenant_header('mutants')}")
        reply = judged(self._attacked, exchange(self._attacked.port, sent, DEPLOY_S))
        if reply is None or reply.status != 201:
            return
        self._attacked.tally.note("accepted")
        registered = str(json.loads(reply.body)["name"])
        self._use(registered, rng)
        self._remove(registered)

    def _use(self, name: str, rng: Random) -> None:
        """Call it many times at once, with and without a profile: some settings matter only to later decisions."""
        port = self._attacked.port
        self._burst(name)
        body = msgspec.json.encode(ProfileOptions(cores=(1,), batches=(1,), concurrency=(1,), layers=False))
        judged(self._attacked, ask(port, "POST", f"/overwinter/v1/functions/{name}/profile", body, DEPLOY_S, "mutants"))
        self._burst(name)
        for path in ("", "/explain"):
            judged(self._attacked, ask(port, "GET", f"/overwinter/v1/functions/{name}{path}"))

    def _burst(self, name: str) -> None:
        ends = [connect(self._attacked.port) for _ in range(BURST)]
        try:
            for end in ends:
                end.sendall(infer_request(name))
            for end in ends:
                judged(self._attacked, receive(end, DEPLOY_S))
        finally:
            for end in ends:
                end.close()

    def _remove(self, name: str) -> None:
        port = self._attacked.port
        reply = judged(self._attacked, ask(port, "DELETE", f"/overwinter/v1/functions/{name}", tenant="mutants"))
        if reply is None or reply.status != 200:
            self._attacked.tally.add("wrong", f"{name} was deployed and cannot be removed: {_reply_text(reply)}")
            return
        answer = judged(self._attacked, exchange(port, infer_request(name), ASK_S))
        if answer is None or answer.status != 404:
            self._attacked.tally.add("wrong", f"{name} was removed and answers {_reply_text(answer)}")

    def _pipeline(self, case: str, rng: Random) -> None:
        pipeline: dict[str, Any] = {
            "name": "pipe",
            "inputs": ["x"],
            "stages": {
                "a": {"function": "first", "inputs": {"x": "input:x"}},
                "b": {"function": "second", "inputs": {"x": "a:y"}},
            },
            "outputs": {"y": "b:y"},
            "timeout_s": 5.0,
        }
        if case == "cycle":
            stage = rng.choice(("a", "b"))
            pipeline["stages"][stage] = {
                "function": rng.choice(("pipe", "first")),
                "inputs": {"x": rng.choice(("a:y", "b:y"))},
            }
        else:
            pipeline = mutation.tree(pipeline, rng)
        port = self._attacked.port
        body = json.dumps(pipeline).encode()
        reply = judged(self._attacked, ask(port, "POST", "/overwinter/v1/pipelines", body, tenant="pipes"))
        if reply is not None and reply.status == 201:
            name = json.loads(reply.body)["name"]
            judged(self._attacked, exchange(port, infer_request(name), DEPLOY_S))
            ignoring_errors(lambda: self._attacked.node.client.for_tenant("pipes").remove(name))


def _reply_text(reply: Reply | None) -> str:
    return "nothing" if reply is None else f"{reply.status}: {reply.said}"


def _change(manifest: dict[str, Any], case: str, rng: Random) -> None:
    """Change one part of the manifest in place."""
    match case:
        case "setting":
            manifest["settings"] = {rng.choice(SETTINGS): rng.choice(BOUNDS)}
        case "least setting":
            manifest["settings"] = {rng.choice(NUMERIC): rng.choice((5e-324, 1e-9, 1))}
        case "largest settings":
            manifest["settings"] = {each: rng.choice(mutation.LARGE) for each in rng.sample(NUMERIC, 3)}
        case "settings together":
            manifest["settings"] = {each: rng.choice(BOUNDS) for each in rng.sample(SETTINGS, 3)}
        case _:
            part = rng.choice(("inputs", "outputs") if case == "specs" else ("blocks", "program"))
            manifest[part] = mutation.tree(manifest[part], rng)
