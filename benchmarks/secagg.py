"""Compare secure aggregation with Flower's SecAgg+: CPU time and bytes, in one run.

    python benchmarks/secagg.py [--parties 100] [--size 100000] [--dropped 0.1] [--complete]

Both add vectors of whole numbers up to 2^21; a tenth of the parties leaves after sharing its secrets and
before sending its vector, and the sum of the others must come out exactly. Ours is the library's `Member`
and `Aggregator` with everything signed, consents included, and a complete graph. Flower's are the functions
of its own client mod (`flwr.client.mod.secure_aggregation.secaggplus_mod`) and, for the server, its
primitives in the order of its workflow, with 31 shares, 16 to a secret, as its sparse graph allows; with
--complete also on a complete graph and our threshold, which takes it many minutes. Its messages are counted
without any framing, ours with header and signature.

Flower's masks come from 32 bits of seed (numpy's RandomState), ours from 256 (AES): its times are not those
of a protocol with equal security.
"""

import argparse
import hashlib
import importlib
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from farthing.deploy.messages.signed import MessageKind, Signer, pack_table, seal
from farthing.deploy.secagg.protocol import (
    Aggregator,
    Member,
    least_threshold,
    pack_words,
    signed_words,
    unpack_words,
    word_bytes,
)

REACH = 2**21
TURN = {"run": "run-1", "round": 1, "nonce": "0" * 32, "about": "0" * 64}


class Meter:
    """A meter of CPU time by role, and of bytes by sender."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, int] = defaultdict(int)

    @contextmanager
    def __call__(self, who: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[who] += time.process_time() - start


def vectors(parties: int, size: int) -> dict[str, np.ndarray]:
    """Return made-up whole numbers."""
    rng = np.random.default_rng(0)
    return {f"p{i:04}": rng.integers(0, REACH, size) for i in range(parties)}


def ours(
    given: dict[str, np.ndarray], gone: set[str], threshold: int, colluding: int
) -> tuple[Meter, np.ndarray]:
    """Run a session of the library."""
    meter, size = Meter(), len(next(iter(given.values())))
    signers = {name: Signer.new() for name in given}
    enrolled = {name: signer.public for name, signer in signers.items()}
    session = hashlib.sha256(b"benchmark").digest()
    survivors = threshold - colluding

    def sent(who: str, kind: MessageKind, body: bytes, signer: Signer) -> None:
        meter.bytes[who] += len(seal(kind, TURN, body, signer))

    members, adverts, sealed = {}, {}, {}
    for name, signer in signers.items():
        with meter("parties"):
            members[name] = Member(session, name, signer, enrolled, survivors=survivors, colluding=colluding)
            adverts[name] = members[name].advertise()
        sent("parties", MessageKind.ADVERT, adverts[name], signer)
    with meter("server"):
        server = Aggregator(session, enrolled, adverts)
        roster = server.settle(threshold)
    for name, member in members.items():
        sent("server", MessageKind.ROSTER, pack_table(adverts), signers[name])
        with meter("parties"):
            sealed[name] = member.share(roster.adverts, threshold)
        sent("parties", MessageKind.SHARES, pack_table(sealed[name]), signers[name])
    with meter("server"):
        routed = server.route(sealed)
    each = word_bytes(float(REACH * len(given)))
    for name, boxes in routed.items():
        sent("server", MessageKind.MASKED_QUESTION, pack_table(boxes), signers[name])
        if name in gone:
            continue
        with meter("parties"):
            body = pack_words(given[name].view(np.uint64) + members[name].mask(boxes, size), each)
        sent("parties", MessageKind.MASKED_ANSWER, body, signers[name])
        with meter("server"):
            server.add(name, unpack_words(body, size, each))
    arrived, consents, revealed = server.arrived, {}, {}
    for name in arrived:
        sent("server", MessageKind.SURVIVORS, pack_table(dict.fromkeys(arrived, b"")), signers[name])
        with meter("parties"):
            consents[name] = members[name].consent(arrived)
        sent("parties", MessageKind.CONSENT, consents[name], signers[name])
    with meter("server"):
        consents = server.consents(consents)
    for name in arrived:
        sent("server", MessageKind.REVEAL, pack_table(consents), signers[name])
        with meter("parties"):
            revealed[name] = members[name].reveal(consents)
        sent("parties", MessageKind.REVEALED, pack_table(revealed[name]), signers[name])
    with meter("server"):
        total = signed_words(server.result(revealed), each)
    return meter, total


def flowers(
    given: dict[str, np.ndarray], gone: set[str], shares: int, threshold: int
) -> tuple[Meter, np.ndarray]:
    """Run a session by Flower's own functions. Raises ImportError where it is not installed."""
    mod: Any = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
    from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

    meter, size, modulus, n = Meter(), len(next(iter(given.values()))), 2**32, len(given)
    ids = {name: number for number, name in enumerate(sorted(given))}
    half = shares // 2
    near = {i: {(i + k) % n for k in range(-half, half + 1)} for i in ids.values()}
    states, keys, boxes = {}, {}, {}
    key = mod.Key
    named = {
        key.SAMPLE_NUMBER: n,
        key.SHARE_NUMBER: shares,
        key.THRESHOLD: threshold,
        key.CLIPPING_RANGE: 8.0,
        key.TARGET_RANGE: 2**22,
        key.MOD_RANGE: modulus,
        key.MAX_WEIGHT: 1.0,
    }
    for i in ids.values():
        states[i] = mod.SecAggPlusState(nid=i)
        with meter("parties"):
            said = mod._setup(states[i], named)
        keys[i] = [said[key.PUBLIC_KEY_1], said[key.PUBLIC_KEY_2]]
        meter.bytes["parties"] += sum(map(len, keys[i]))
    for i in ids.values():
        told = {str(j): keys[j] for j in sorted(near[i])}
        meter.bytes["server"] += sum(len(a) + len(b) for a, b in told.values())
        with meter("parties"):
            said = mod._share_keys(states[i], told)
        for j, box in zip(said[key.DESTINATION_LIST], said[key.CIPHERTEXT_LIST], strict=True):
            boxes.setdefault(j, []).append((i, box))
            meter.bytes["parties"] += len(box)
            meter.bytes["server"] += len(box)
    total = np.zeros(size, np.int64)
    active = {i for name, i in ids.items() if name not in gone}
    for name, i in ids.items():
        if i not in active:
            continue
        with meter("parties"):
            vector = _masked(mod, states[i], boxes[i], given[name], modulus)
        meter.bytes["parties"] += vector.nbytes
        with meter("server"):
            total = (total + vector) & (modulus - 1)
    collected: dict[int, list[bytes]] = {i: [] for i in ids.values()}
    for i in active:
        asked = {
            key.ACTIVE_NODE_ID_LIST: sorted(near[i] & active),
            key.DEAD_NODE_ID_LIST: sorted(near[i] - active),
        }
        meter.bytes["server"] += 8 * len(near[i])
        with meter("parties"):
            said = mod._unmask(states[i], asked)
        for owner, share in zip(said[key.NODE_ID_LIST], said[key.SHARE_LIST], strict=True):
            collected[owner].append(share)
            meter.bytes["parties"] += len(share) + 8
    with meter("server"):
        for i, found in collected.items():
            secret = combine_shares(found)
            if i in active:
                total = total - pseudo_rand_gen(secret, modulus, [(size,)])[0]
                continue
            for j in near[i] - {i}:
                shared = generate_shared_key(bytes_to_private_key(secret), bytes_to_public_key(keys[j][0]))
                mask = pseudo_rand_gen(shared, modulus, [(size,)])[0]
                total = total + mask if i > j else total - mask
        total = total & (modulus - 1)
    return meter, total


def _masked(
    mod: Any, state: Any, boxes: list[tuple[int, bytes]], vector: np.ndarray, modulus: int
) -> np.ndarray:
    """Run Flower's third stage on whole numbers, without its quantisation."""
    total = vector + mod.pseudo_rand_gen(state.rd_seed, modulus, [vector.shape])[0]
    for source, box in boxes:
        text = mod.decrypt(state.ss2_dict[source], box)
        _, _, seed_share, key_share = mod.share_keys_plaintext_separate(text)
        state.rd_seed_share_dict[source], state.sk1_share_dict[source] = seed_share, key_share
        shared = mod.generate_shared_key(
            mod.bytes_to_private_key(state.sk1), mod.bytes_to_public_key(state.public_keys_dict[source][0])
        )
        mask = mod.pseudo_rand_gen(shared, modulus, [vector.shape])[0]
        total = total + mask if state.nid > source else total - mask
    masked: np.ndarray = total & (modulus - 1)
    return masked


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parties", type=int, default=100)
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--dropped", type=float, default=0.1)
    parser.add_argument("--complete", action="store_true")
    chosen = parser.parse_args([] if arguments is None else arguments)
    n, colluding = chosen.parties, chosen.parties // 5
    given = vectors(n, chosen.size)
    gone = set(sorted(given)[:: max(1, round(1 / chosen.dropped))]) if chosen.dropped else set()
    exact = sum(vector for name, vector in given.items() if name not in gone)
    threshold = least_threshold(n, colluding, n // 2)
    print(f"{n} parties, {chosen.size} coordinates, {len(gone)} leave; {threshold} shares to a secret")
    print(f"{'':34}{'ms a party':>12}{'s server':>10}{'kB a party':>12}{'kB to each':>12}  sum")

    def show(what: str, found: tuple[Meter, np.ndarray]) -> None:
        meter, total = found
        right = "exact" if np.array_equal(total, exact) else "WRONG"
        print(
            f"{what:34}{1e3 * meter.seconds['parties'] / n:12.1f}{meter.seconds['server']:10.2f}"
            f"{meter.bytes['parties'] / n / 1e3:12.1f}{meter.bytes['server'] / n / 1e3:12.1f}  {right}",
            flush=True,
        )

    show("farthing, complete graph", ours(given, gone, threshold, colluding))
    try:
        if n > 31:
            show("Flower SecAgg+, 31 shares", flowers(given, gone, 31, 16))
        if chosen.complete or n <= 31:
            show("Flower SecAgg+, complete graph", flowers(given, gone, n, threshold))
    except ImportError as error:
        print(f"Flower is left out: {error}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
