// The arrays of an engine's views, with names for their fields: in the order of octavo/core/stats.py.

const named = (...fields) => (values) => Object.fromEntries(fields.map((field, i) => [field, values[i]]));

export const readStep = named("step", "at", "seconds", "worker", "kernels", "between", "prefill", "decode", "running", "waiting", "swapped", "used", "cached", "free", "preemptions", "queried", "hits");
export const readGroup = named("id", "status", "seqs", "prompt", "output", "computed", "cached", "age", "recomputes", "recomputed", "swaps", "swapped", "preemptedFor", "isFetching", "waitsFor", "blocks", "isResumed");
export const readLife = named("kind", "at", "step", "group", "amount", "left", "arrival", "why", "preemptedFor");
export const readChange = named("kind", "step", "group", "blocks", "cost", "preemptedFor", "why");

const readTier = named("tier", "asked", "found", "written", "dropped", "evicted", "damaged", "bytesRead", "bytesWritten", "readSeconds", "writeSeconds", "heldBytes", "maxBytes", "errors", "trouble");
/** Where `StoreStats` has the tiers of the KV stores. */
const TIERS = 8;
export const readTiers = (state) => (state.stores?.[TIERS] ?? []).map(readTier);
