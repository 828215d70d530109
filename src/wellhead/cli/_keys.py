"""What `--json` prints, key by key: the text of docs/cli.md, and what tests hold the verbs to.

A key in brackets comes only where the text says so.
"""

from __future__ import annotations

from collections.abc import Mapping

_RUN = {
    "state": "`running`, `complete`, `complete_with_rejects`, `stopped`, `gave_up` or `disk`; `status` also says"
    " `planned` of a run that has a plan and nothing captured, with fewer keys",
    "doing": "what it is at, in words",
    "rows": "rows of the current plan",
    "kept": "rows whose states are all committed",
    "captured": "distinct states that this call captured and committed",
    "rejected": "rows that the plan left out: {reason: count}",
    "quarantined": "rows whose capture failed a check or the engine",
    "quarantine": "the same by reason: {reason: count}",
    "pending": "rows not captured yet; kept + all rejected + quarantined + pending = rows",
    "tokens": "tokens of distinct states committed",
    "plan_tokens": "tokens of all distinct states that the plan asks for",
    "uncommitted_tokens": "tokens captured and not yet durable",
    "raw_bytes": "bytes of the committed states as bf16",
    "stored_bytes": "bytes of the shard files",
    "ratio": "stored bytes over the raw bytes of all that is in the shards, or null",
    "other_states": "distinct states in the shards that the current plan does not name",
    "plan": "number of the plan in force",
    "data": "the file that it was made from",
    "mask": "its mask policy",
    "max_length": "where it cuts rows, in tokens",
    "bytes_per_token": "raw bytes of one token's states",
    "tokens_per_s": "tokens committed a second, the newest of `rates`; null before the second commit",
    "captured_tokens_per_s": "tokens captured a second by this call, committed or not; null before the first",
    "rates": "[{`window_s`, `tokens_per_s`, `error`}]: committed tokens a second, with the relative standard error",
    "eta_s": "[low, mid, high] seconds to the end, or null",
    "oldest_in_flight": "the longest sample of the batch that is with the engine, or null: {`id`, `tokens`, "
    "`batch_samples`, `batch_tokens`, `age_s`, `expected_s`}",
    "still_s": "seconds since something was last captured or committed",
    "commits": "shards that this call committed",
    "warnings": "texts",
    "free_bytes": "free space where the run is",
    "engine": "the engine, its version and where it captures",
    "model": "the model's name",
    "layers": "the stored tensors in words",
    "writer": "the id of the life that the figures are of: a folder of writers/",
}

KEYS: Mapping[str, Mapping[str, str]] = {
    "plan": {
        "samples": "rows kept: what `extract` will have when it is complete",
        "rejected": "rows left out: {reason: count}",
        "duplicates": "rows kept whose token ids an earlier row has: their states are stored once",
        "tokens": "tokens of distinct samples",
        "supervised_tokens": "tokens that the loss mask selects; null with `--lengths`",
        "longest_tokens": "tokens of the longest sample",
        "bytes_per_token": "raw bytes of one token's states: (layers + 1) × hidden size × 2",
        "raw_bytes": "exact bytes of the states, before the codec",
        "stored_bytes": "estimate of the bytes on disk",
        "ratio": "the estimate's stored bytes over raw bytes",
        "needed_bytes": "estimate of what is still to be written, where RUN has some of it",
        "worst_case_bytes": "raw bytes if every row had the longest row's length",
        "reserve_bytes": "space to leave free, as asked for",
        "inodes": "files that the run will make, at most",
        "free_inodes": "inodes that are free, or null where that is not known",
        "staging_bytes": "what the staging of a server must hold at least; the embedded engine needs none",
        "free_bytes": "free space where the run would be",
        "fits": "whether it fits into the free space less the reserve",
        "largest_n_that_fits": "how many of the first rows of the file fit",
        "largest_max_length_that_fits": "the longest max length with which all rows fit; null if they fit as they are",
        "seconds": "[low, high] of the extraction at `--tokens-per-s`, else null",
        "layers": "the layers in words, such as `r_3 = after block 3 of 61`",
        "[rows]": "rows of the file; not with `--lengths`, nor are the next four",
        "[plan]": "number of the plan",
        "[max_length]": "where rows were cut, or null",
        "[date]": "the date that the template saw",
        "[truncated]": "rows cut",
        "[observed]": "what `--observed` is worth, with that option",
    },
    "extract": _RUN,
    "status": {
        **_RUN,
        "lost_shards": "recorded shards that are not there or have another size; null of a living run",
        "[rejected_rows]": "[{`line`, `reason`, `detail`}], with `--rejects`",
        "[quarantined_samples]": "[{`id`, `tokens`, `reason`, `detail`}], with `--rejects`",
        "ledger_problems": "lines of ledgers that cannot be trusted (`verify` names them); null of a living run",
        "holder": "{`pid`, `host`, `started`, `writer`, `command`} of the living process that holds the run, or null",
    },
    "verify": {
        "ok": "whether nothing is wrong; `suspect` findings are not wrong",
        "checked": "what was checked: {kind: count}",
        "findings": "[{`kind`, `id`, `shard`, `detail`}]; kind is `missing`, `corrupt`, `orphan`, `stale`, `foreign` or"
        " `suspect`",
        "layers": "with `--recapture`: [{`name`, `own_error`, `neighbour`, `neighbour_error`}], else empty",
    },
}
