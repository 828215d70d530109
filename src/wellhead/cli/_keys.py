"""What `--json` prints, key by key: the text of docs/cli.md, and what tests hold the verbs to."""

from __future__ import annotations

from collections.abc import Mapping

_COUNTS = {
    "rows": "rows of the current plan",
    "kept": "rows whose states are all committed",
    "captured": "distinct states that this call captured and committed",
    "rejected": "rows that the plan left out: {reason: count}",
    "quarantined": "rows whose capture failed a check or the engine",
    "pending": "rows not captured yet; kept + all rejected + quarantined + pending = rows",
}

_RUN = {
    "state": "`running`, `complete`, `complete_with_rejects`, `stopped`, `gave_up` or `disk`",
    **_COUNTS,
    "tokens": "tokens of distinct states committed",
    "plan_tokens": "tokens of all distinct states that the plan asks for",
    "uncommitted_tokens": "tokens captured and not yet durable",
    "raw_bytes": "bytes of the committed states as bf16",
    "stored_bytes": "bytes of the shard files",
    "bytes_per_token": "raw bytes of one token's states",
    "tokens_per_s": "the newest of `rates`, or null before the second commit",
    "rates": "[{`window_s`, `tokens_per_s`, `error`}]: committed tokens a second, with the relative standard error",
    "eta_s": "[low, mid, high] seconds to the end, or null",
    "oldest_in_flight": "{`id`, `tokens`, `age_s`, `expected_s`} of what the engine has had longest, or null",
    "free_bytes": "free space where the run is",
    "engine": "the engine, its version and where it captures",
}

KEYS: Mapping[str, Mapping[str, str]] = {
    "plan": {
        "samples": "rows kept: what `extract` will have when it is complete",
        "rejected": "rows left out: {reason: count}",
        "duplicates": "rows kept whose token ids an earlier row has: their states are stored once",
        "tokens": "tokens of distinct samples",
        "supervised_tokens": "tokens of distinct samples that the loss mask selects",
        "bytes_per_token": "raw bytes of one token's states: (layers + 1) × hidden size × 2",
        "raw_bytes": "exact bytes of the states, before the codec",
        "stored_bytes": "estimate of the bytes on disk",
        "ratio": "the estimate's stored bytes over raw bytes",
        "worst_case_bytes": "raw bytes if every row had the longest row's length",
        "reserve_bytes": "space to leave free, as asked for",
        "inodes": "files that the run will make, at most",
        "staging_bytes": "space for payloads in flight",
        "free_bytes": "free space where the run would be",
        "fits": "whether the states fit into the free space less the reserve",
        "largest_n_that_fits": "how many of the first rows of the file fit",
        "seconds": "[low, high] of the extraction, or null when nothing has been measured",
        "layers": "the layers in words, such as `r_3 = after block 3 of 61`",
    },
    "extract": _RUN,
    "status": {
        **_RUN,
        "holder": "{`pid`, `host`, `started`, `writer`, `command`} of the living process that holds the run, or null",
    },
    "verify": {
        "ok": "whether nothing is wrong; `suspect` findings are not wrong",
        "checked": "what was checked: {kind: count}",
        "findings": "[{`kind`, `id`, `shard`, `detail`}]; kind is `missing`, `corrupt`, `orphan`, `stale`, `foreign` or"
        " `suspect`",
    },
}
