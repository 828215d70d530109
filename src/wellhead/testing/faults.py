"""A script of faults for the stub engine: every way in which capture is known to go wrong, on demand.

A script is a text of faults separated by `;`. A fault is a kind and, after a colon, settings separated by `,`:

    nan:every=100;zeros:layer=r3,sample=5;slow:seconds=0.5,after=20

Kinds that `capture.check` finds:

    zeros        all values zero, from `row` on            zero_tail    zero from `row` on (default: the second half)
    constant     every value of a row the same             nan, inf     one bad value, in row `row`
    missing      the tensor does not come back             short        the last `rows` rows are missing (default 16)
    wide         twice the width                           other_ids    another request's ids and states
    equal        the tensor holds the bits of another one

Kinds that no check of one payload can find, because everything has the right shape. The preflight of an engine finds
them when they are there from the start (no setting that selects samples), `verify --recapture` later:

    other_states   another request's rows under the right ids
    shift          the layer after the one asked for
    pre_norm       the state before the norm in place of the final state

Kinds of behaviour:

    slow         waits `seconds` before it answers         silence      never answers
    fail         a failure that is not worth a retry       oom          a retryable failure, only in batches of several
    dies         RuntimeError in mid-batch                 kill         SIGKILL to the own process

Settings that select samples; all of them must hold, and with none every sample is hit. Samples are counted from 0 over
the life of the engine: `sample=N` exactly this one, `every=N` each N-th, `after=N` from this one on, `times=N` at most
N times, `id=PREFIX` samples whose id starts so, `share=F` this share of all ids (the same ids in every life).
`layer=NAME` limits a damage to one tensor (`r3`, `final`); the default is all, for `missing`, `shift` and `equal` the
first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from wellhead.errors import UsageError

if TYPE_CHECKING:
    from wellhead.core import Bits

DAMAGES = frozenset({"zeros", "zero_tail", "constant", "nan", "inf", "missing", "short", "wide", "equal"})
MISTAKES = frozenset({"other_ids", "other_states", "shift", "pre_norm"})
BEHAVIOURS = frozenset({"slow", "silence", "fail", "oom", "dies", "kill"})
KINDS = DAMAGES | MISTAKES | BEHAVIOURS

_NAN, _INF, _ONE = 0x7FC0, 0x7F80, 0x3F80
_ONE_TENSOR = frozenset({"missing", "equal"})


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a script; the module's text says what the settings mean."""

    kind: str
    sample: int | None = None
    every: int | None = None
    after: int | None = None
    times: int | None = None
    id: str | None = None
    share: float | None = None
    layer: str | None = None
    row: int | None = None
    rows: int = 16
    seconds: float = 1.0

    def fires(self, ordinal: int, sample_id: str, fired: int) -> bool:
        """Whether it hits the `ordinal`-th sample of this life, having hit `fired` samples before."""
        return (
            (self.sample is None or ordinal == self.sample)
            and (self.every is None or (ordinal + 1) % self.every == 0)
            and (self.after is None or ordinal >= self.after)
            and (self.times is None or fired < self.times)
            and (self.id is None or sample_id.startswith(self.id))
            and (self.share is None or int(sample_id[:8], 16) < self.share * 2**32)
        )

    @property
    def always(self) -> bool:
        """Whether nothing selects samples, so that a preflight must meet it."""
        selectors = (self.sample, self.every, self.after, self.times, self.id, self.share)
        return all(setting is None for setting in selectors)

    def hits(self, tensor: str) -> bool:
        return self.layer in (None, tensor)


@dataclass(frozen=True, slots=True)
class FaultScript:
    """The faults of one engine, in the order in which they are applied."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, text: str) -> FaultScript:
        """Raises UsageError naming the fault that it does not understand."""
        return cls(tuple(_parse(part.strip()) for part in text.split(";") if part.strip()))


def damage(fault: Fault, states: Mapping[str, Bits]) -> dict[str, Bits]:
    """`states` with a fault of `DAMAGES` applied to the tensors that it hits. The arrays given are not changed."""
    out = dict(states)
    names = [name for name in states if fault.hits(name)]
    if fault.kind in _ONE_TENSOR:
        names = names[:1]
    for name in names:
        if fault.kind == "missing":
            del out[name]
        elif fault.kind == "equal":
            out[name] = next((bits for other, bits in states.items() if other != name), states[name]).copy()
        else:
            out[name] = _damaged(fault, states[name])
    return out


def _damaged(fault: Fault, bits: Bits) -> Bits:
    tokens, width = bits.shape
    if fault.kind == "short":
        return bits[: max(0, tokens - fault.rows)].copy()
    if fault.kind == "wide":
        return np.concatenate([bits, bits], axis=1)
    out = bits.copy()
    if fault.kind == "zeros":
        out[fault.row or 0 :] = 0
    elif fault.kind == "zero_tail":
        out[tokens // 2 if fault.row is None else fault.row :] = 0
    elif fault.kind == "constant":
        out[fault.row or 0 :] = _ONE
    else:
        out[min(fault.row or 0, tokens - 1), width // 2] = _NAN if fault.kind == "nan" else _INF
    return out


def _parse(text: str) -> Fault:
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise UsageError(f"fault {text!r}: unknown kind {kind!r}", f"kinds: {', '.join(sorted(KINDS))}")
    types = {field.name: str(field.type) for field in fields(Fault) if field.name != "kind"}
    settings: dict[str, Any] = {}
    for setting in filter(None, rest.split(",")):
        key, _, value = setting.partition("=")
        if key not in types:
            raise UsageError(f"fault {text!r}: unknown setting {key!r}", f"settings: {', '.join(sorted(types))}")
        try:
            settings[key] = _value(types[key], value)
        except ValueError:
            raise UsageError(f"fault {text!r}: {key}={value!r} is not a number", f"for example {key}=5") from None
    if settings.get("every") == 0:
        raise UsageError(f"fault {text!r}: every=0 selects nothing", "every must be at least 1")
    return Fault(kind, **settings)


def _value(type_name: str, text: str) -> int | float | str:
    if type_name.startswith("int"):
        return int(text)
    return float(text) if type_name.startswith("float") else text
