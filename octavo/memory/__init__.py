"""Which block holds what: the block pool, reference counts, block tables, the watermark. Integers only."""
