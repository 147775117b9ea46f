"""KV cache allocators beside the paged one, for the comparison of Kwon et al. 2023 (PagedAttention, section 6.2)."""
