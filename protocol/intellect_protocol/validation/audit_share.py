"""How much to check: the share of an owner's units whose forward pass a validator runs, and who draws it.

Checks 1 to 9 run on every unit. An **audit** is the forward pass, checks 10 to 12. It costs a validator about
as much as the unit cost its node, so only a share of units is audited, and this share must be such that
cheating loses money in expectation.

**The rule.** With G the owner's unverified gain and S its slashable stake, both in stake tokens,

    p = clamp(G * safety / S, min_share, 1)        1 for a newcomer, and 1 without stake

A cheat that is not drawn (probability 1 - p) keeps G, one that is drawn loses S: it does not pay while
G (1 - p) - p S <= 0, that is p >= G / (G + S) (Becker, "Crime and Punishment", J. Political Economy 76, 1968;
the same inequality prices the audits of optimistic rollups). The linear form is used because it is never
below that (G / S >= G / (G + S)), because it reaches 1 while a stake can still pay for the gain (G * safety
>= S), where the fraction never does, and because `safety` then has a plain meaning: where an audit catches a
cheat with probability d, the share has to be 1 / d times as large, so safety >= 1 / d is enough.

**The gain.** G = unit_value * k * open_versions: the unit is the k-th of its owner in its version, in the
order of receipts and over *all its nodes*, and the owner may have as many units open in each other version
of the window (open_versions = async_level + 1). So nodes can be split and joined at will without changing p.
Whatever set of its open units an owner cheats at, the largest position k in one of the versions is at least
the number of cheated units there, so

    expected gain <= unit_value * (number of cheated units) <= S * max p / safety <= S * P(caught) / safety

while no p has reached 1, and a cheat at p = 1 gains nothing. Because it holds for every set, it holds for
those that an owner picks after seeing the verdicts of others. The same with an audit that catches with
probability d: then S * P(caught) / (safety * d), for owners whose open units are worth less than S / safety.

**The draw.** A unit is audited if u < p, with

    u = first 53 bits of SHA-256("intellect/audit-draw/1" | run id | seed of the version | u64 version
                                 | short(node) | u64 index | file hash) / 2^53

Everything but the seed is fixed by the node before the receipt, and the seed is unknown to it: it cannot
tell which unit is drawn, nor grind a file that is not. Times and signatures of receipts are left out,
because the coordinator chooses them.

**The commitment.** The seeds of all versions form one hash chain (Lamport, "Password Authentication with
Insecure Communication", CACM 24, 1981), whose end, the anchor, stands in the signed revision:

    seed(v) = SHA-256("intellect/audit-seed/1" | seed(v + 1))        anchor = seed(first_version - 1)

So every seed is committed to before its version exists, everybody has the commitment, and no version can have
two. The coordinator reveals seed(v) in the work file of version v, when nothing can be added to it; that
tells nobody the seed of a later version. What the coordinator could still do is tell a node of its own the
seed beforehand: against that, validators audit units of their own choice as well (`spot_checks`).
"""

from __future__ import annotations

from hmac import compare_digest

from ..keys import Signer
from ..run import AuditTerms
from ..wire import sha256, short, u64

SEED_BYTES = 32
CHAIN_LENGTH = 1 << 18
"""Versions that one chain serves; a longer run starts another by a revision with another first_version."""

_STRIDE = 1 << 9
_TOKEN_UNIT = 10**18


def unverified_gain(terms: AuditTerms, position: int, open_versions: int) -> float:
    """G: what an owner could have gained by units that no audit has looked at, in stake tokens.

    Args:
        position: k, 1 for the owner's first unit of the version.
        open_versions: versions in which units are accepted at a time, async_level + 1.

    Raises:
        ValueError: a count is below 1.
    """
    if position < 1 or open_versions < 1:
        raise ValueError("positions and versions are counted from 1")
    return terms.unit_value * position * open_versions


def audit_share(terms: AuditTerms, *, accepted: int, gain: float, slashable: int) -> float:
    """p: the probability with which a unit is audited, in [0, 1].

    Args:
        accepted: the owner's accepted units of versions that are closed, over all its nodes.
        gain: `unverified_gain`, in stake tokens.
        slashable: what a case of fraud could take, in 10^-18 token: after open cases and the court's caps.
    """
    if accepted < terms.probation_units or slashable <= 0:
        return 1.0
    return min(1.0, max(terms.min_share, gain * terms.safety / (slashable / _TOKEN_UNIT)))


def draw(run_id: bytes, seed: bytes, version: int, node: bytes, index: int, file_hash: bytes) -> float:
    """u of a receipted unit, uniform in [0, 1) for who does not know the seed; it is audited if u < p.

    Args:
        node: 20 address bytes. file_hash: of the rollout file, 32 bytes.
    """
    digest = sha256(b"intellect/audit-draw/1", run_id, seed, u64(version), short(node), u64(index), file_hash)
    # 53 bits, so that no value rounds to 1: a share of 1 audits everything.
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)


def previous_seed(seed: bytes) -> bytes:
    """The seed of the version before, or the anchor if there is none."""
    return sha256(b"intellect/audit-seed/1", seed)


def is_committed(terms: AuditTerms, version: int, seed: bytes) -> bool:
    """Whether a revealed seed is the one that the anchor commits to for this version."""
    steps = version - terms.first_version + 1
    if not 0 < steps <= CHAIN_LENGTH or len(seed) != SEED_BYTES:
        return False
    for _ in range(steps):
        seed = previous_seed(seed)
    return compare_digest(seed, bytes.fromhex(terms.anchor))


class SeedChain:
    """The coordinator's seeds.

    They follow from its key alone, so neither a kill nor the loss of the database can lose what was committed
    to. Building takes CHAIN_LENGTH hashes, a fraction of a second.
    """

    def __init__(self, signer: Signer, run_id: bytes, first_version: int) -> None:
        """
        Args:
            signer: the coordinator's key; its signatures must be deterministic (RFC 6979).
        """
        digest = sha256(b"intellect/audit-root/1", run_id, u64(first_version))
        seed = sha256(signer.sign_digest(digest))
        self.first_version = first_version
        self._marks: dict[int, bytes] = {}  # every _STRIDE-th seed, by its place
        for place in range(CHAIN_LENGTH - 1, -1, -1):
            if (place + 1) % _STRIDE == 0:
                self._marks[place] = seed
            seed = previous_seed(seed)
        self.anchor = seed.hex()

    def seed(self, version: int) -> bytes:
        """The version's seed, 32 bytes; secret until its work file is published.

        Raises:
            ValueError: the chain does not reach to this version.
        """
        place = version - self.first_version
        if not 0 <= place < CHAIN_LENGTH:
            raise ValueError(f"the seed chain has no seed for version {version}")
        mark = (place // _STRIDE + 1) * _STRIDE - 1
        seed = self._marks[mark]
        for _ in range(mark - place):
            seed = previous_seed(seed)
        return seed
